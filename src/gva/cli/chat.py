"""`gva chat`: talk to a server."""

import argparse
import os
import sys
from typing import Any


def add(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a server in the terminal, streaming")
    chat.add_argument("url", help="of `gva serve` or any server of OpenAI's protocol, as http://localhost:8000")
    chat.add_argument("--model", help="by default the first that the server has")
    key = chat.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="what this server wants; without it none is sent")
    key.add_argument(
        "--api-key-from", metavar="VARIABLE", help="the environment variable that holds it, OPENAI_API_KEY say"
    )
    chat.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    chat.add_argument("--temperature", type=float, default=0.7)
    chat.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.errors import check
    from gva.serve.chat import Conversation, connect, talk
    from gva.text import printable

    key = arguments.api_key
    if arguments.api_key_from is not None:
        key = os.environ.get(arguments.api_key_from)
        check(bool(key), "--api-key-from", arguments.api_key_from, "no such environment variable, or an empty one")
    client = connect(arguments.url, key)
    from openai import APIConnectionError, APIError, AuthenticationError

    try:
        sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        conversation = Conversation(client, arguments.model, **sampling)
        talk(conversation, sys.stdin, sys.stdout)
    except APIConnectionError:
        told = f"{arguments.url}: no server answers there; start one with `gva serve CHECKPOINT`"
        raise ConnectionError(told) from None
    except AuthenticationError:
        told = f"{arguments.url}: the server wants its key; give it as --api-key, or by --api-key-from"
        raise PermissionError(told) from None
    except APIError as error:
        raise ConnectionError(f"{arguments.url}: {printable(str(error))}") from None
    except KeyboardInterrupt:
        print()
    return 0
