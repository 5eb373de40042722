"""Measurements during a run: validation loss, and the diagnostics that show which mechanisms have formed."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gva import diagnostics
from gva.data.batches import IGNORED, Batches
from gva.train.parallel import Ranks, SummedLoss, arithmetic
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
        with arithmetic(recipe, ranks.device), torch.compiler.set_stance("force_eager"):
            losses = module(**batch, per_token=True)
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
        "bits_per_byte": mean / batches.dataset.bytes_per_token / math.log(2),
        "valid_tokens": int(sum(count)),
        "loss_by_position": binned,
        # How much more of the context helps: late positions against the second sixteenth of it.
        "in_context_score": binned[-1] - binned[min(1, len(binned) - 1)],
    }


@torch.no_grad()
def look_inside(module: nn.Module, batches: Batches, recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Induction score, attention to the previous token per head, scales of queries and keys per slice."""
    vocabulary, half = batches.dataset.vocab_size, batches.length // 2
    generator = torch.Generator().manual_seed(1)
    once = torch.randint(vocabulary, (REPEATED, half), generator=generator)
    rows = torch.cat([once, once], 1).to(ranks.device)
    text = batches.load(list(range(min(LOOKED_AT, batches.sequences))))["input_ids"][:, :256].to(ranks.device)
    loss = _summed_loss(module)

    def run(tokens: Tensor) -> Tensor:
        with arithmetic(recipe, ranks.device), torch.compiler.set_stance("force_eager"):
            return module(tokens[:, :-1], tokens[:, 1:], per_token=True)

    losses = run(rows)
    return {
        "first_copy_loss": losses[:, : half - 1].mean().item(),
        "second_copy_loss": losses[:, half:].mean().item(),  # low once induction heads have formed
        "previous_token_attention": diagnostics.previous_token_attention(loss.model, text, lambda: run(text)),
        "qk_scales": diagnostics.qk_scales(loss.model, text, lambda: run(text)),
    }


def _summed_loss(module: nn.Module) -> SummedLoss:
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    assert isinstance(inner, SummedLoss)
    return inner
