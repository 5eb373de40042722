"""Prompts as people give them, in and out of a generator; strings through a tokenizer of transformers."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from gva.errors import check

Prompt = list[int] | str


def listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    check(not isinstance(prompts, str), "prompts", prompts, "is one string; give a list of them")
    return list(prompts)


def tokens_of(prompt: Prompt, tokenizer: Any, vocabulary: int) -> list[int]:
    """The tokens of a prompt. One that the model does not have is told here: a GPU would end the process for it."""
    if isinstance(prompt, str):
        check(tokenizer is not None, "prompt", prompt, "is a string; give PagedGenerator a tokenizer, or give tokens")
        prompt = encoded(tokenizer, prompt)
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    check(isinstance(given, list | tuple), "prompt", given, "must be a list of tokens, or a string")
    wrong = [token for token in given if not isinstance(token, Integral) or not 0 <= int(token) < vocabulary]
    check(not wrong, "prompt", wrong[:1], f"is no token of the model, which has 0 to {vocabulary - 1}")
    return [int(token) for token in given]


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens that the tokenizer makes of it, those that it adds included. An empty text begins a document, as the
    end of the one before did in training."""
    return list(tokenizer(text)["input_ids"]) or [i for i in (tokenizer.eos_token_id,) if i is not None]


def continuation(tokenizer: Any, before: list[int], tokens: list[int]) -> str:
    """The text of new tokens, read behind what they continue: alone, some tokenizers would drop their first space."""
    asked, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, before + tokens))
    return whole[len(asked) :]
