"""Measurements during a run: validation loss, task accuracies, and diagnostics that show which mechanisms formed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gva import diagnostics
from gva.data.batches import IGNORED, Batches
from gva.data.recall import RecallBatches
from gva.evaluate.encoding import Pack, pack_items
from gva.evaluate.loading import open_tokenizer
from gva.evaluate.results import summarise
from gva.evaluate.scoring import Losses, by_item, loglikelihoods
from gva.evaluate.tasks import Item, Task, chosen_tasks, items_of, load_rows
from gva.model import GvaForCausalLM
from gva.run.ranks import Ranks
from gva.train.parallel import arithmetic
from gva.train.recipe import Recipe

POSITION_BINS = 16
REPEATED = 4  # random sequences, each shown twice
LOOKED_AT = 4  # sequences that attention weights are measured on


@torch.no_grad()
def losses_by_position(module: nn.Module, batches: Batches, sequences: int, recipe: Recipe, ranks: Ranks) -> Tensor:
    """Summed loss and count of targets at each position, [2, length], over the first sequences of a split."""
    sums = torch.zeros(2, batches.length, dtype=torch.float64, device=ranks.device)
    every = range(min(sequences, batches.sequences))
    mine = list(every)[ranks.rank :: ranks.world]
    # Every rank makes as many passes, since sharded weights are gathered by all of them together.
    passes = math.ceil(math.ceil(len(every) / ranks.world) / recipe.micro_batch)
    for number in range(passes):
        chosen = mine[number * recipe.micro_batch : (number + 1) * recipe.micro_batch]
        batch = {k: v.to(ranks.device) for k, v in batches.load(chosen or [0]).items()}
        losses = _losses(module, recipe, ranks)(**batch)
        if chosen:
            counts = batch["labels"] != IGNORED
            sums += torch.stack([(losses * counts).double().sum(0), counts.double().sum(0)])
    dist.all_reduce(sums)
    return sums


def validate(module: nn.Module, batches: Batches, recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Validation loss in nats per token and bits per byte of text, and the loss along the context."""
    loss, count = losses_by_position(module, batches, recipe.eval_sequences, recipe, ranks).tolist()
    mean = sum(loss) / sum(count)
    width = max(1, batches.length // POSITION_BINS)
    starts = range(0, batches.length, width)
    binned = [sum(loss[i : i + width]) / max(1.0, sum(count[i : i + width])) for i in starts]
    return {
        "valid_loss": mean,
        "bits_per_byte": mean / batches.bytes_per_token(recipe.eval_sequences) / math.log(2),
        "valid_tokens": int(sum(count)),
        "loss_by_position": binned,
        # How much more of the context helps: late positions against the second sixteenth of it.
        "in_context_score": binned[-1] - binned[min(1, len(binned) - 1)],
    }


@dataclass(frozen=True)
class PackedTask:
    """A task that is ready to be scored, tokenised once for the whole run."""

    task: Task
    items: list[Item]
    packs: list[Pack]


def load_tasks(recipe: Recipe, tokenizer: Path, context: int) -> list[PackedTask]:
    """The tasks of the recipe, none if it scores none; what is wrong with them is told before the first step."""
    if not recipe.tasks_every:
        return []
    loaded, opened = [], open_tokenizer(tokenizer)
    for task in chosen_tasks(recipe.tasks):
        items = items_of(task, load_rows(task, Path(recipe.tasks_data), recipe.tasks_limit))
        loaded.append(PackedTask(task, items, pack_items(task, items, opened, context)))
    return loaded


def score_tasks(module: nn.Module, tasks: list[PackedTask], recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """The accuracies of each task; every rank scores a part of its items."""
    losses = _losses(module, recipe, ranks)
    results, budget = {}, recipe.micro_batch * recipe.length  # as many tokens as a step has at a time
    for entry in tasks:
        found = loglikelihoods(entry.packs, losses, ranks.device, budget, ranks.rank, ranks.world)
        dist.all_reduce(found)
        results[entry.task.name] = summarise(entry.task, entry.items, by_item(entry.items, found))
    return results


@torch.no_grad()
def look_inside(
    model: GvaForCausalLM, module: nn.Module, batches: Batches, recipe: Recipe, ranks: Ranks
) -> dict[str, Any]:
    """Induction score, attention to the previous token per head, scales of queries and keys per slice."""
    vocabulary, half = batches.dataset.vocab_size, batches.length // 2
    generator = torch.Generator().manual_seed(1)
    once = torch.randint(vocabulary, (REPEATED, half), generator=generator)
    rows = torch.cat([once, once], 1).to(ranks.device)
    text = batches.load(list(range(min(LOOKED_AT, batches.sequences))))["input_ids"][:, :256].to(ranks.device)
    per_target = _losses(module, recipe, ranks)

    def run(tokens: Tensor) -> Tensor:
        return per_target(input_ids=tokens[:, :-1], labels=tokens[:, 1:])

    losses = run(rows)
    return {
        "first_copy_loss": losses[:, : half - 1].mean().item(),
        "second_copy_loss": losses[:, half:].mean().item(),  # low once induction heads have formed
        "previous_token_attention": diagnostics.previous_token_attention(model, text, lambda: run(text)),
        "qk_scales": diagnostics.qk_scales(model, text, lambda: run(text)),
    }


@torch.no_grad()
def recall(module: nn.Module, batches: Batches, recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """The share of right answers by number of pairs, and the most pairs that are trained from now on."""
    assert isinstance(batches, RecallBatches)
    hits, found = _losses(module, recipe, ranks, hits=True), {}
    for pairs, batch in batches.tests():
        right = hits(**{name: tensor.to(ranks.device) for name, tensor in batch.items()}).sum()
        dist.all_reduce(right)  # of equal tests: rounding must not let ranks go separate ways
        found[pairs] = right.item() / ranks.world / int((batch["labels"] != IGNORED).sum())
    batches.learned(found)
    return {"accuracy": found, "pairs": int(batches.pairs)}


def _losses(module: nn.Module, recipe: Recipe, ranks: Ranks, hits: bool = False) -> Losses:
    """The loss of each target, or whether it is hit, in the precision of training; eager, for shapes that training does
    not have."""

    def losses(**inputs: Tensor) -> Tensor:
        with arithmetic(recipe, ranks.device), torch.compiler.set_stance("force_eager"):
            return module(**inputs, per_token=True, hits=hits)

    return losses
