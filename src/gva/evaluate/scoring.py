"""Our own evaluator: the loglikelihood of every choice, in batches of packs of about one length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from gva.data.batches import IGNORED
from gva.errors import check
from gva.evaluate.against import answers
from gva.evaluate.encoding import Pack, collate, pack_items
from gva.evaluate.results import Scored, summarise
from gva.evaluate.tasks import Item, Task, items_of, load_rows

# The loss in nats of each label [B, T], zero where it is ignored, from input_ids, labels, position_ids [B, T] and a
# boolean attention_mask [B, 1, T, T], given by name; without a mask, causal.
Losses = Callable[..., Tensor]

BATCH_TOKENS = 16384
HEAD_ROWS = 2048  # targets whose logits exist at a time: a vocabulary is wide


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: list[Task],
    data_dir: Path | None = None,
    limit: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    share: bool = True,
    progress: bool = True,
) -> dict[str, Scored]:
    """Score the first `limit` items (0: all) of each task on the model's device, zero-shot."""
    context, losses, found = model.config.max_position_embeddings, model_losses(model), {}
    for task in tasks:
        items = items_of(task, load_rows(task, data_dir, limit))
        packs = pack_items(task, items, tokenizer, context, share)
        scores = loglikelihoods(packs, losses, model.device, batch_tokens, progress=task.name if progress else "")
        scored = by_item(items, scores)
        pairs, right = [item.pairs for item in items], answers(task, items, scored)
        found[task.name] = Scored(summarise(task, items, scored), scored, pairs, right)
    return found


def make_batches(packs: list[Pack], batch_tokens: int) -> list[list[int]]:
    """Which packs go through the model together: longest first, as many as fill `batch_tokens` slots with padding."""
    check(batch_tokens > 0, "batch_tokens", batch_tokens, "must be positive")
    order = sorted(range(len(packs)), key=lambda n: (-len(packs[n]), n))
    batches: list[list[int]] = []
    for n in order:
        if batches and len(packs[batches[-1][0]]) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(n)
        else:
            batches.append([n])
    return batches


@torch.no_grad()
def loglikelihoods(
    packs: list[Pack],
    losses: Losses,
    device: torch.device,
    batch_tokens: int = BATCH_TOKENS,
    rank: int = 0,
    world: int = 1,
    progress: str = "",
) -> Tensor:
    """The loglikelihood in nats of each choice of each pack, one after another, float64 on `device`.

    Of several ranks each scores every world-th batch and leaves zeros for the others', so that a sum over ranks is
    whole. All ranks make as many forward passes, since sharded weights are gathered by all of them together.
    """
    first = [0]
    for pack in packs:
        first.append(first[-1] + pack.choices)
    found = torch.zeros(first[-1], dtype=torch.float64, device=device)
    batches = make_batches(packs, batch_tokens)
    with tqdm(total=len(packs), desc=progress, unit="item", disable=not progress) as bar:
        for start in range(0, len(batches), world):
            mine = batches[start + rank] if start + rank < len(batches) else None
            chosen = batches[start] if mine is None else mine
            inputs = {name: t.to(device) for name, t in collate([packs[n] for n in chosen]).items()}
            branch = inputs.pop("branch")
            lost = losses(**inputs).double()
            if mine is not None:
                scored = inputs["labels"] != IGNORED
                offset = torch.tensor([first[n] - 1 for n in mine], device=device)  # branches count from 1
                found.index_add_(0, (branch + offset[:, None])[scored], -lost[scored])
            bar.update(sum(len(batch) for batch in batches[start : start + world]))
    return found


def by_item(items: list[Item], found: Tensor) -> list[list[float]]:
    """The loglikelihoods of each item's choices."""
    return [part.tolist() for part in found.cpu().split([len(item.pairs) for item in items])]


def model_losses(model: Any) -> Losses:
    """The losses of a causal language model of transformers. Logits exist for scored slots alone, in float32."""
    body, head = model.base_model, model.get_output_embeddings()

    def losses(
        input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        hidden = body(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False)[0]
        scored = labels != IGNORED
        rows, targets = hidden[scored].split(HEAD_ROWS), labels[scored].split(HEAD_ROWS)
        lost = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
        pieces = zip(rows, targets, strict=True)
        lost[scored] = torch.cat([cross_entropy(head(r).float(), t, reduction="none") for r, t in pieces])
        return lost

    return losses
