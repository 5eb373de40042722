"""A BPE trained in a process of its own: its table of words, the most of what a preparation needs, is gone when texts
are encoded. In one thread, as more take more memory and hardly less time.

Pieces of texts go in by stdin, each after its length, and the tokenizer comes out by stdout.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Thread

from tokenizers import Tokenizer

from gva.data.documents import DataError
from gva.data.pieces import pieces
from gva.data.tokenizer import END_OF_TEXT, TextTokenizer, train_bpe

_LENGTH = struct.Struct("<q")
_END = -1


def train_apart(texts: Iterable[str], vocab_size: int, progress: bool = False) -> TextTokenizer:
    """The tokenizer of `train_bpe`, byte for byte. What goes wrong with a text is raised here."""
    # -P, or modules of the folder that one stands in would be the process's.
    words = [sys.executable, "-P", "-m", __name__, str(vocab_size), "progress" if progress else "quiet"]
    serially = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=serially) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, which its code says
                for piece in (piece for text in texts for piece in pieces(text)):
                    content = piece.encode()
                    process.stdin.write(_LENGTH.pack(len(content)))
                    process.stdin.write(content)
                process.stdin.write(_LENGTH.pack(_END))
                process.stdin.flush()
            made = process.stdout.read()
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
    if process.returncode:
        raise DataError(
            f"no BPE could be trained: its process ended with {process.returncode}, as for want of memory; "
            "give it more, or a tokenizer with --tokenizer"
        )
    tokenizer = Tokenizer.from_str(made.decode())
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return TextTokenizer(tokenizer, end)


def _received() -> Iterator[str]:
    while (length := _LENGTH.unpack(_exactly(_LENGTH.size))[0]) != _END:
        yield _exactly(length).decode()
    Thread(target=_end_with_parent, daemon=True).start()


def _exactly(size: int) -> bytes:
    content = sys.stdin.buffer.read(size)
    if len(content) < size:
        os._exit(1)  # whoever sent it was killed, or has found something wrong
    return content


def _end_with_parent() -> None:
    """Nothing more comes from a parent but its end, before which it waits for the tokenizer."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to obey
    made = train_bpe(_received(), int(sys.argv[1]), sys.argv[2] == "progress")
    sys.stdout.buffer.write(made.tokenizer.to_str().encode())
