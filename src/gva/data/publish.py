"""A model as a folder that others load: it stops where a text ends, and says what it is."""

import json
import os
from pathlib import Path
from typing import Any

from gva.data.tokenizer import SETTINGS, load_tokenizer, tokenizer_settings
from gva.run.atomic import write_atomically
from gva.run.files import within

CARD = "README.md"
# What of a folder is its tokenizer: it may be that of a whole model.
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*")
# And what else stays true of a model that is trained further.
LASTING = ("generation_config.json", "conversion.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


def publish(model: Any, tokenizer: Path, out: Path, card: str) -> None:
    """Write weights, config, the tokenizer of a folder and the card. The model ends and pads with the tokens
    that the tokenizer says; what ends a text pads it where there is no token for that."""
    known, settings = load_tokenizer(tokenizer), tokenizer_settings(tokenizer)
    if settings.get("pad_token") is None:
        settings |= {"pad_token": known.tokenizer.id_to_token(known.end), "padding_side": "left"}
    pad = settings["pad_token"]
    ids: dict[str, int | None] = {"eos_token_id": known.end}
    ids["pad_token_id"] = known.tokenizer.token_to_id(pad["content"] if isinstance(pad, dict) else pad)
    for name, value in ids.items():
        setattr(model.config, name, value)
    # A pipeline would ask for 256 new tokens, which a small context does not hold beside a prompt.
    model.generation_config = type(model.generation_config)(**ids, max_length=model.config.max_position_embeddings)
    model.save_pretrained(out)
    _copy(files_of(tokenizer, TOKENIZER), out)
    write_atomically(out / SETTINGS, json.dumps(settings, indent=2))
    write_atomically(out / CARD, card)


def publish_further(model: Any, source: Path, out: Path, card: str) -> None:
    """Write weights, config and the card, and beside them what of the folder that the model began from stays true."""
    model.save_pretrained(out)
    _copy(files_of(source), out)
    write_atomically(out / CARD, card)


def files_of(folder: Path, patterns: tuple[str, ...] = (*TOKENIZER, *LASTING)) -> list[Path]:
    """The files of a folder that go along with a model."""
    return [within(folder, f.name) for pattern in patterns for f in folder.glob(pattern) if f.is_file()]


def _copy(files: list[Path], out: Path) -> None:
    for file in files:
        write_atomically(out / file.name, file.read_bytes())


def replace_section(folder: str | os.PathLike, name: str, text: str) -> None:
    """Write another text between the marks of a section of the card. All else is its owner's, who may have removed the
    marks too."""
    path, (first, last) = Path(folder) / CARD, marks(name)
    before, begun, rest = path.read_text().partition(first) if path.is_file() else ("", "", "")
    _, ended, after = rest.partition(last)
    if begun and ended:
        write_atomically(path, before + section(name, text) + after)


def section(name: str, text: str) -> str:
    first, last = marks(name)
    return f"{first}\n{text.strip()}\n{last}"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
