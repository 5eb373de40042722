"""Strings in and out of a generator, through a tokenizer of transformers."""

from typing import Any


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens that the tokenizer makes of it, those that it adds included. An empty text begins a document, as the
    end of the one before did in training."""
    return list(tokenizer(text)["input_ids"]) or [i for i in (tokenizer.eos_token_id,) if i is not None]


def continuation(tokenizer: Any, before: list[int], tokens: list[int]) -> str:
    """The text of new tokens, read behind what they continue: alone, some tokenizers would drop their first space."""
    asked, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, before + tokens))
    return whole[len(asked) :]
