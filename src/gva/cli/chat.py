"""`gva chat`: talk to a server."""

import argparse
import os
import sys
from typing import Any


def add(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a server in the terminal, streaming")
    chat.add_argument("url", help="of `gva serve` or any server of OpenAI's protocol, as http://localhost:8000")
    chat.add_argument("--model", help="by default the first that the server has")
    chat.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="by default $OPENAI_API_KEY")
    chat.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    chat.add_argument("--temperature", type=float, default=0.7)
    chat.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.serve.chat import Conversation, connect, talk

    client = connect(arguments.url, arguments.api_key)
    from openai import APIConnectionError, APIError, AuthenticationError

    try:
        sampling = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        conversation = Conversation(client, arguments.model, **sampling)
        talk(conversation, sys.stdin, sys.stdout)
    except APIConnectionError:
        told = f"{arguments.url}: no server answers there; start one with `gva serve CHECKPOINT`"
        raise ConnectionError(told) from None
    except AuthenticationError:
        raise PermissionError(f"{arguments.url}: the server wants its key; give it as --api-key") from None
    except APIError as error:
        raise ConnectionError(f"{arguments.url}: {error}") from None
    except KeyboardInterrupt:
        print()
    return 0
