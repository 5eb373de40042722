"""Items to tokens: cut into context and continuation as lm-evaluation-harness does, packed so that what the choices
of an item share is computed once.

A pack is a small tree laid out in one row: the shared beginning, then what each choice adds.

    tokens     c0 c1 c2 | c3 a0 a1 | c3 b0        (the last token of a continuation is only ever a target)
    branch      0  0  0 |  1  1  1 |  2  2        a token sees branch 0 and its own
    positions   0  1  2 |  3  4  5 |  3  4        as if each choice stood alone
    targets     -  -  - | a0 a1 a2 | b0 b1

The shared part ends before the token that predicts the first target of any choice, so that a slot has one target.
For most tasks it is the context; of WinoGrande, where contexts differ, it is the sentence up to the blank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gva.data.batches import IGNORED
from gva.data.documents import DataError
from gva.evaluate.tasks import Item, Task

Encoded = tuple[list[int], list[int]]  # context and continuation of one choice


@dataclass(frozen=True)
class Pack:
    """An item in one row of slots; each field but `choices` has one entry per slot."""

    tokens: list[int]
    positions: list[int]
    branch: list[int]
    targets: list[int]
    choices: int

    def __len__(self) -> int:
        return len(self.tokens)


def encode_items(items: list[Item], tokenizer: Any) -> list[list[Encoded]]:
    """Each item's choices as tokens. Spaces at the end of a context belong to the continuation; a continuation is
    what the whole text has beyond as many tokens as the context alone."""
    pairs = [[_move_spaces(*pair) for pair in item.pairs] for item in items]
    texts = dict.fromkeys(text for choices in pairs for context, end in choices for text in (context, context + end))
    encode = dict(zip(texts, _encode(list(texts), tokenizer), strict=True))

    def choice(context: str, continuation: str) -> Encoded:
        if not context:
            return _without_context(continuation, tokenizer)
        begun = encode[context]
        return begun, encode[context + continuation][len(begun) :]

    return [[choice(*pair) for pair in choices] for choices in pairs]


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """With whatever special tokens the tokenizer adds, unless a text begins with the first of them already."""
    first = tokenizer.decode(_first_token(tokenizer))
    ids = tokenizer(texts, padding=False, truncation=False)["input_ids"] if texts else []
    for n, text in enumerate(texts):
        if text.startswith(first):
            ids[n] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _without_context(continuation: str, tokenizer: Any) -> Encoded:
    ids, first = tokenizer.encode(continuation, add_special_tokens=False), _first_token(tokenizer)
    return (ids[:1], ids[1:]) if ids[:1] == [first] else ([first], ids)


def _first_token(tokenizer: Any) -> int:
    """What text begins after: the beginning-of-text token, or where there is none, the end of the text before."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        raise DataError("the tokenizer has neither a bos_token nor an eos_token; name one in tokenizer_config.json")
    return first


def pack_items(task: Task, items: list[Item], tokenizer: Any, context: int, share: bool = True) -> list[Pack]:
    """The packs of a task's items. Text longer than the model's context loses tokens on the left, per choice.
    Without `share` every choice is a pack of its own (same numbers, more work)."""
    packs = []
    for number, choices in enumerate(encode_items(items, tokenizer), 1):
        for _, continuation in choices:
            if not 0 < len(continuation) <= context:
                raise DataError(
                    f"{task.name}: item {number} has a continuation of {len(continuation)} tokens, the model can score "
                    f"1 to {context} (its max_position_embeddings); leave the task out"
                )
        packs += [_pack(choices, context)] if share else [_pack([choice], context) for choice in choices]
    return packs


def _pack(choices: list[Encoded], context: int) -> Pack:
    whole = [(begun + continuation)[-(context + 1) :] for begun, continuation in choices]
    starts = [len(ids) - 1 - len(continuation) for ids, (_, continuation) in zip(whole, choices, strict=True)]
    shared = _common(whole, min(starts))
    tokens, targets = whole[0][:shared], [IGNORED] * shared
    positions, branch = list(range(shared)), [0] * shared
    for number, (ids, start) in enumerate(zip(whole, starts, strict=True), 1):
        tokens = tokens + ids[shared:-1]
        targets += [IGNORED] * (start - shared) + ids[start + 1 :]
        positions += range(shared, len(ids) - 1)
        branch += [number] * (len(ids) - 1 - shared)
    return Pack(tokens, positions, branch, targets, len(choices))


def _common(rows: list[list[int]], most: int) -> int:
    """How many tokens all rows begin with alike, at most `most`."""
    return next((i for i in range(most) if any(row[i] != rows[0][i] for row in rows)), most)


def collate(packs: list[Pack]) -> dict[str, Tensor]:
    """input_ids, labels, position_ids, branch [B, T], and attention_mask [B, 1, T, T], true where a slot sees another.
    Rows are padded on the right with slots that see and are seen by nothing scored."""
    longest = max(map(len, packs))

    def padded(field: str, filler: int) -> Tensor:
        return torch.tensor([getattr(p, field) + [filler] * (longest - len(p)) for p in packs])

    branch = padded("branch", -1)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    earlier = torch.ones(longest, longest, dtype=torch.bool).tril()
    return {
        "input_ids": padded("tokens", 0),
        "labels": padded("targets", IGNORED),
        "position_ids": padded("positions", 0),
        "branch": branch,
        "attention_mask": (seen & earlier)[:, None],
    }
