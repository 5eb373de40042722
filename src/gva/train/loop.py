"""The training loop, readable as if for one device. `train` starts a run or goes on with it."""

import math
import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gva import cost
from gva.config import GvaConfig
from gva.data.batches import IGNORED, Batches
from gva.data.same import check_own, cutting
from gva.data.source import Dataset, described, make_batches, open_data
from gva.errors import check, check_finite
from gva.model import GvaForCausalLM
from gva.run.checkpoints import Checkpoints, random_state, set_random_state, steps_in
from gva.run.folder import CHECKPOINTS, MODEL, claim, locked
from gva.run.metrics import METRICS, Metrics, NonFiniteLoss, is_damaged, is_done, read_metrics, record
from gva.run.ranks import Ranks, process_group
from gva.train import measure
from gva.train.export import export_model
from gva.train.optimizer import learning_rate, make_optimizer, named_state, set_learning_rate
from gva.train.parallel import SummedLoss, accumulating, arithmetic, parallelize
from gva.train.recipe import Recipe, identity_defaults, identity_of
from gva.train.trained import NOTHING, Given
from gva.train.zclip import ZClip, scale_gradients, total_norm
from gva.weights import is_whole


@dataclass
class Run:
    """All that a step touches."""

    config: GvaConfig
    recipe: Recipe
    ranks: Ranks
    model: GvaForCausalLM
    loss: nn.Module  # the model and its loss, compiled and spread over ranks
    optimizer: torch.optim.Optimizer
    zclip: ZClip
    batches: Batches
    given: Given
    teacher: SummedLoss | None
    step: int = 0  # steps done

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as tensors. The data position is the step."""
        if isinstance(self.loss, FSDPModule):
            self.loss.reshard()  # a forward pass without a backward one, an evaluation say, leaves weights gathered
        return {
            **named_state(self.model, self.optimizer),
            **{f"zclip.{name}": value for name, value in self.zclip.state.items()},
            **random_state(self.ranks.device),
            **self.batches.state,
            "step": torch.tensor(self.step),
        }


def train(
    config: GvaConfig,
    recipe: Recipe,
    data: Path,
    out: Path,
    *,
    given: Given = NOTHING,
    device: str | None = None,
    progress: bool = True,
) -> None:
    """Train to the end of the recipe in `out`, going on from the last whole checkpoint there, if any.

    Leaves metrics.jsonl, checkpoints/, and the trained model as a HuggingFace folder in model/.
    """
    train_set, valid_set = open_data(data), open_data(data, "valid")
    _check_fit(config, recipe, train_set)
    check_own(train_set)
    given.check_fits(config, recipe, train_set)
    valid = make_batches(valid_set, recipe.length, 1, 0, recipe.document_mask)
    tasks = measure.load_tasks(recipe, data / "tokenizer", config.max_position_embeddings)
    with process_group(device) as ranks, locked(out) if ranks.first else nullcontext():
        identity = identity_of(config, recipe, train_set, valid_set, given.fingerprints)
        if ranks.first:
            facts = {
                "recipe": asdict(recipe),
                "hardware": ranks.hardware,
                "data": described(train_set),
                "tokenizer": cutting(data / "tokenizer"),
            }
            claim(out, identity, identity_defaults(), facts)
        dist.barrier(ranks.side)
        if _is_trained(out, recipe, ranks):
            return
        run = _build(config, recipe, train_set, ranks, given)
        checkpoints = Checkpoints(out, identity, ranks, recipe.keep_checkpoints)
        steps = checkpoints.steps()
        if not steps and is_done(out) and (out / MODEL).is_dir():
            raise OSError(
                f"{out / MODEL}: not whole, though its training is done, and there is no checkpoint to export it from; "
                f"copy it again, or remove {out / MODEL} to train it anew"
            )
        if steps:
            state = run.state()
            checkpoints.load(steps[-1], state)
            set_random_state(state, ranks.device)
            run.step = int(state["step"])
        metrics = Metrics(out, run.step, recipe.steps, ranks.first, progress)
        try:
            with StopRequest() as stop:
                _measure_start(run, valid, metrics)
                _loop(run, valid, tasks, checkpoints, metrics, stop)
            export_model(run.model, recipe, train_set, out, ranks, given)
            metrics.event("done", run.step, {"tokens": recipe.tokens})
        except BaseException:
            with suppress(Exception):
                checkpoints.abandon()
            raise
        finally:
            metrics.close()


def _is_trained(out: Path, recipe: Recipe, ranks: Ranks) -> bool:
    """Whether nothing is left to do. Raises OSError where it cannot be known: what is trained is not trained again."""
    done, left = is_done(out), steps_in(out / CHECKPOINTS)
    ended = any(line["step"] == recipe.steps for line in read_metrics(out, "step"))
    whole = (ended or done) and is_whole(out / MODEL, unchanged=True)
    if whole and not left and not done:  # checkpoints go after the line that says so
        if ranks.first:
            record(out, {"kind": "done", "step": recipe.steps, "tokens": recipe.tokens})
        return True
    if not done and not left and is_damaged(out):
        raise OSError(
            f"{out / METRICS}: lines are damaged, one of which may say that this run is done, and there is no "
            "checkpoint to go on from; copy the file again, or remove it to train anew"
        )
    return done and whole


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and has written a checkpoint."""


def _measure_start(run: Run, valid: Batches, metrics: Metrics) -> None:
    """The validation loss of the teacher, and of the weights that it begins from before they change."""
    if run.step:
        return
    for kind, module, trained in (("teacher", run.teacher, run.given.teacher), ("eval", run.loss, run.given.start)):
        if module is not None and trained is not None:
            found = measure.validate(module, valid, run.recipe, run.ranks)
            check_finite(f"{trained.path}: validation loss", [found["valid_loss"]], "its weights are damaged")
            known = {"name": trained.name, "fingerprint": trained.fingerprint} if kind == "teacher" else {}
            metrics.event(kind, 0, known | found)


def _loop(
    run: Run,
    valid: Batches,
    tasks: list[measure.PackedTask],
    checkpoints: Checkpoints,
    metrics: Metrics,
    stop: "StopRequest",
) -> None:
    recipe, ranks = run.recipe, run.ranks
    metrics.restart_clock()
    while run.step < recipe.steps:
        rate = learning_rate(recipe, run.step)
        set_learning_rate(run.optimizer, rate)
        scalars = train_step(run)
        run.step += 1
        metrics.step(run.step, scalars, lr=rate, tokens=run.step * recipe.tokens_per_step)
        last = run.step == recipe.steps
        due = {every: last or ((n := getattr(recipe, every)) > 0 and run.step % n == 0) for every in _INTERVALS}
        # Ranks agree on a stop where they meet anyway; a process alone need not wait for that.
        tested = run.batches.is_tested(run.step)
        if not any(due.values()) and not tested and not (stop.wanted and ranks.world == 1):
            continue
        _flush(run, metrics, checkpoints)
        stopping = stop.wanted_by_any(ranks) and not last
        if tested:
            metrics.event("recall", run.step, measure.recall(run.loss, run.batches, recipe, ranks))
        if due["eval_every"]:
            found = measure.validate(run.loss, valid, recipe, ranks)
            if not math.isfinite(found["valid_loss"]):
                raise _diverged(run, checkpoints, f"validation loss {found['valid_loss']} at step {run.step}", run.step)
            metrics.event("eval", run.step, found)
        if due["diagnostics_every"] and recipe.diagnostics_every:
            metrics.event("diagnostics", run.step, measure.look_inside(run.model, run.loss, valid, recipe, ranks))
        if due["tasks_every"] and tasks:
            results = measure.score_tasks(run.loss, tasks, recipe, ranks)
            metrics.event("tasks", run.step, {"tokens": run.step * recipe.tokens_per_step, "results": results})
        if due["checkpoint_every"] or stopping:
            state = run.state()
            if not total_norm(t for name, t in state.items() if name.startswith("model.")).isfinite():
                raise _diverged(run, checkpoints, f"weights that are not numbers after step {run.step}", run.step)
            checkpoints.save(run.step, state)
        if stopping:
            checkpoints.finish()
            raise Stopped(f"stopped at step {run.step}; the same command goes on from there")
        checkpoints.poll()
        if tested or any(due[every] for every in _INTERVALS if every != "log_every"):
            metrics.restart_clock()
    checkpoints.finish()


_INTERVALS = ("log_every", "eval_every", "checkpoint_every", "diagnostics_every", "tasks_every")


# By how many there are: what is minimised comes first. With a teacher `loss` is still that of the next token alone.
LOSSES = {1: ("loss",), 3: ("objective", "loss", "kl")}


def train_step(run: Run) -> dict[str, Tensor]:
    """One optimizer step on the global batch of the current step; returns numbers that are still on the device."""
    recipe, ranks = run.recipe, run.ranks
    indices = run.batches.indices(run.step)[ranks.rank :: ranks.world]
    micro = [indices[i : i + recipe.micro_batch] for i in range(0, len(indices), recipe.micro_batch)]
    loaded = [run.batches.load(part) for part in micro]
    targets = torch.tensor(float(sum(int((b["labels"] != IGNORED).sum()) for b in loaded)))
    if recipe.document_mask and ranks.world > 1:
        dist.all_reduce(targets, group=ranks.side)
    elif not recipe.document_mask:
        targets.fill_(recipe.global_batch * recipe.length)
    total = torch.zeros(1, device=ranks.device)
    for number, batch in enumerate(loaded):
        inputs = {name: _to_device(tensor, ranks.device) for name, tensor in batch.items()}
        with accumulating(run.loss, last=number == len(loaded) - 1), arithmetic(recipe, ranks.device):
            loss = run.loss(**inputs).reshape(-1)
            # Ranks average their gradients, so each counts its share of the global mean that many times.
            (loss[0] * (ranks.world / targets.item())).backward()
        total = total + loss.detach()
    if ranks.world > 1:
        dist.all_reduce(total)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    norm = total_norm(gradients)
    target = run.zclip(norm) if recipe.zclip else norm.double()
    scale_gradients(gradients, norm, target)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    clipped = (target < norm.double()).double()
    losses = dict(zip(LOSSES[len(total)], total / targets.item(), strict=True))
    return {**losses, "grad_norm": norm, "grad_norm_clipped": target, "clipped": clipped}


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _build(config: GvaConfig, recipe: Recipe, dataset: Dataset, ranks: Ranks, given: Given = NOTHING) -> Run:
    torch.manual_seed(recipe.seed)
    config = GvaConfig.from_dict(config.to_dict())
    config._attn_implementation = "sdpa"
    model = GvaForCausalLM(config) if given.start is None else given.start.load(torch.float32)
    model.to(ranks.device).train()
    teacher = None
    if given.teacher is not None:
        frozen = given.teacher.load(torch.bfloat16 if recipe.precision == "bf16" else torch.float32)
        teacher = SummedLoss(frozen.to(ranks.device)).eval().requires_grad_(False)
    loss = parallelize(model, recipe, ranks, teacher)
    batches = make_batches(dataset, recipe.length, recipe.global_batch, recipe.order_seed, recipe.document_mask)
    optimizer, zclip = make_optimizer(model, recipe), ZClip(ranks.device)
    return Run(config, recipe, ranks, model, loss, optimizer, zclip, batches, given, teacher)


def _check_fit(config: GvaConfig, recipe: Recipe, dataset: Dataset) -> None:
    size, limit = dataset.vocab_size, config.max_position_embeddings
    check(size <= config.vocab_size, "vocab_size", config.vocab_size, f"the data has {size} tokens")
    check(recipe.length <= limit, "length", recipe.length, f"exceeds max_position_embeddings={limit}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check(recipe.global_batch % world == 0, "global_batch", recipe.global_batch, f"must be a multiple of {world} ranks")


def _flush(run: Run, metrics: Metrics, checkpoints: Checkpoints) -> None:
    flops = cost.train_flops_per_token(run.config, run.recipe.length)
    if run.teacher is not None:  # forward alone
        flops += cost.train_flops_per_token(run.teacher.model.config, run.recipe.length) / 3
    try:
        metrics.flush(run.recipe.tokens_per_step, flops, run.ranks.world)
    except NonFiniteLoss as error:
        raise _diverged(run, checkpoints, str(error), error.step) from None


def _diverged(run: Run, checkpoints: Checkpoints, told: str, step: int) -> NonFiniteLoss:
    """What to say, and what is left: checkpoints have finite weights. Every rank is here, having seen the same."""
    checkpoints.finish()
    whole = [saved for saved in checkpoints.steps() if saved < step]
    left = f"the checkpoint of step {whole[-1]} is from before it" if whole else "there is no checkpoint yet"
    return NonFiniteLoss(
        f"{told}: stopped; its batch was the sequences {run.batches.indices(step - 1)} of "
        f"{run.batches.dataset.folder}; {left}. Try, in another --out, a lower lr, a longer warmup, zclip=true or "
        "precision=fp32",
        step,
    )


class StopRequest:
    """Ctrl-C and a scheduler's SIGTERM ask for a checkpoint and an end; a second one ends at once."""

    wanted = False

    def __enter__(self) -> "StopRequest":
        self._before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not the main thread: then nobody sends us signals either
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        self.wanted = True
        signal.signal(number, signal.SIG_DFL)

    def wanted_by_any(self, ranks: Ranks) -> bool:
        flag = torch.tensor(float(self.wanted))
        if ranks.world > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks.side)
        return bool(flag)
