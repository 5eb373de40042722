"""Where a server will listen: on this machine alone unless it is told otherwise."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK, PORT = "127.0.0.1", "8000"
SHORTEST = len("--h")  # what is as short stands for several flags of vLLM, which refuses it


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


def address(flags: list[str]) -> Address:
    given = _from_file(_value(flags, "config"))
    host, port, socket = (_value(flags, name) or given.get(name) for name in ("host", "port", "uds"))
    key = _value(flags, "api-key") or given.get("api-key") or given.get("api_key") or os.environ.get("VLLM_API_KEY")
    return Address(host and str(host), str(port or PORT), socket and str(socket), bool(key))


def _value(flags: list[str], name: str) -> str | None:
    """The last value of a flag, as --name VALUE or --name=VALUE, cut short too where vLLM would understand it."""
    found = None
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        word, equals, value = flag.partition("=")
        if len(word) > SHORTEST and f"--{name}".startswith(word.replace("_", "-")):
            found = value if equals else following
    return found


def _from_file(path: str | None) -> dict[str, Any]:
    import yaml  # transformers, and vLLM, need it too

    if path is None or not Path(path).is_file():
        return {}
    content = yaml.safe_load(Path(path).read_text())
    return content if isinstance(content, dict) else {}
