"""Where a server will listen: on this machine alone unless it is told otherwise."""

import os
from dataclasses import dataclass

from gva.errors import check
from gva.serve.flags import Flags

LOOPBACK, PORT = "127.0.0.1", "8000"


@dataclass(frozen=True)
class Address:
    """What vLLM's flags, and the file given as --config, say of it."""

    host: str | None
    port: str
    socket: str | None
    key: bool  # whether requests need one

    @property
    def flags(self) -> list[str]:
        """What to add: vLLM by itself listens on every address of the machine."""
        return [] if self.host or self.socket else ["--host", LOOPBACK]

    @property
    def told(self) -> str:
        host = self.host or LOOPBACK
        where = self.socket or f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        alone = self.socket or host in (LOOPBACK, "localhost", "::1")
        who = "this machine alone" if alone else "every machine that reaches this one"
        key = "with the key" if self.key else "without --api-key: whoever reaches it may use it"
        return f"listening on {where} for {who}, {key}"


def address(flags: Flags) -> Address:
    host, port, socket = (flags.value(name) for name in ("host", "port", "uds"))
    check(host != "", "--host", "", "names no address; leave it out to listen on this machine alone")
    told = flags.value("api-key")
    key = os.environ.get("VLLM_API_KEY") if told is None else told  # an empty flag is no key, whatever is in that
    return Address(host, port or PORT, socket, bool(key))
