"""A conversation with a server of OpenAI's protocol, in the terminal, word by word as they come."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from gva.text import printable

HELP = "Empty line or Ctrl-D ends."


def connect(url: str, api_key: str | None) -> Any:
    """A client of the server at `url`, with or without the /v1 at its end, that sends it this key and nothing else of
    ours: openai's client would add a key, an organisation and headers meant for another server, if the environment has
    any. They are taken out of the environment of this process."""
    try:
        from openai import OpenAI
    except ImportError:
        raise OSError("needs the package openai: pip install 'grouped-value-attention[serve]'") from None
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        del os.environ[name]
    base = url.rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    return OpenAI(base_url=base if base.endswith("/v1") else f"{base}/v1", api_key=api_key or "none", max_retries=0)


class Conversation:
    """What was said so far. A model without a chat template only continues text: it is then given all of it."""

    def __init__(self, client: Any, model: str | None, **sampling: Any) -> None:
        self.client, self.sampling = client, sampling
        self.model = model or client.models.list().data[0].id
        self.messages: list[dict[str, str]] = []
        self.template = True

    def say(self, text: str) -> Iterator[str]:
        """Pieces of the answer, as they come."""
        self.messages.append({"role": "user", "content": text})
        said = []
        for piece in self._answer():
            said.append(piece)
            yield piece
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def _answer(self) -> Iterator[str]:
        from openai import BadRequestError

        if self.template:
            try:
                stream = self.client.chat.completions.create(
                    model=self.model, messages=self.messages, stream=True, **self.sampling
                )
                yield from (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
                return
            except BadRequestError as error:
                if "chat template" not in str(error):
                    raise
                self.template = False
        prompt = "".join(message["content"] for message in self.messages)
        stream = self.client.completions.create(model=self.model, prompt=prompt, stream=True, **self.sampling)
        yield from (chunk.choices[0].text for chunk in stream if chunk.choices)


def talk(conversation: Conversation, lines: Iterable[str], out: TextIO, prompt: str = "> ") -> None:
    """Answer line after line. An error of the server is told, and the conversation goes on."""
    from openai import APIError

    print(f"{printable(conversation.model)}. {HELP}", file=out)
    print(prompt, end="", flush=True, file=out)
    for line in lines:
        if not line.strip():
            break
        told = conversation.template
        try:
            for piece in conversation.say(line.rstrip("\n")):
                print(printable(piece), end="", flush=True, file=out)
        except APIError as error:
            conversation.messages.pop()  # what could not be answered
            print(f"gva chat: {printable(str(error))}", file=sys.stderr)
        if told and not conversation.template:
            print("\n(this model has no chat template: it continues the text)", end="", file=out)
        print(f"\n{prompt}", end="", flush=True, file=out)
    print(file=out)
