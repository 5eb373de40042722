"""The training loop, readable as if for one device. `train` starts a run or goes on with it."""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gva
from gva import cost
from gva.config import GvaConfig
from gva.data.batches import IGNORED, Batches
from gva.data.shards import TokenDataset, write_atomically
from gva.errors import check
from gva.model import GvaForCausalLM
from gva.train import evaluate
from gva.train.checkpoints import Checkpoints, random_state, set_random_state
from gva.train.export import export_model
from gva.train.metrics import Metrics, NonFiniteLoss, is_done
from gva.train.optimizer import learning_rate, make_optimizer, named_state, set_learning_rate
from gva.train.parallel import Ranks, accumulating, arithmetic, parallelize, process_group
from gva.train.recipe import Recipe
from gva.train.zclip import ZClip, gradient_norm, scale_gradients

RUN = "run.json"


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
    step: int = 0  # steps done

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as tensors. The data position is the step."""
        return {
            **named_state(self.model, self.optimizer),
            **{f"zclip.{name}": value for name, value in self.zclip.state.items()},
            **random_state(self.ranks.device),
            "step": torch.tensor(self.step),
        }


def train(
    config: GvaConfig,
    recipe: Recipe,
    data: Path,
    out: Path,
    *,
    device: str | None = None,
    progress: bool = True,
) -> None:
    """Train to the end of the recipe in `out`, going on from the last whole checkpoint there, if any.

    Leaves metrics.jsonl, checkpoints/, and the trained model as a HuggingFace folder in model/.
    """
    train_set, valid_set = TokenDataset(data), TokenDataset(data, "valid")
    _check_fit(config, recipe, train_set)
    with process_group(device) as ranks:
        if ranks.first:
            out.mkdir(parents=True, exist_ok=True)
            _claim(out, config, recipe, train_set)
        dist.barrier(ranks.side)
        if is_done(out):
            return
        run = _build(config, recipe, train_set, ranks)
        checkpoints = Checkpoints(out / "checkpoints", ranks, recipe.keep_checkpoints)
        if steps := checkpoints.steps():
            state = run.state()
            checkpoints.load(steps[-1], state)
            set_random_state(state, ranks.device)
            run.step = int(state["step"])
        valid = Batches(valid_set, recipe.length, 1, 0, recipe.document_mask)
        metrics = Metrics(out, run.step, recipe.steps, ranks.first, progress)
        try:
            _loop(run, valid, checkpoints, metrics, out)
        finally:
            with suppress(Exception):
                checkpoints.finish()
            metrics.close()


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and has written a checkpoint."""


def _loop(run: Run, valid: Batches, checkpoints: Checkpoints, metrics: Metrics, out: Path) -> None:
    recipe, ranks = run.recipe, run.ranks
    tokens_per_step = recipe.global_batch * recipe.length
    flops = cost.train_flops_per_token(run.config, recipe.length)
    stop = _StopRequest()
    began = time.perf_counter()
    metrics.restart_clock()
    while run.step < recipe.steps:
        rate = learning_rate(recipe, run.step)
        set_learning_rate(run.optimizer, rate)
        scalars = train_step(run)
        run.step += 1
        metrics.step(run.step, scalars, lr=rate, tokens=run.step * tokens_per_step)
        last = run.step == recipe.steps
        due = {every: last or ((n := getattr(recipe, every)) > 0 and run.step % n == 0) for every in _INTERVALS}
        if any(due.values()):
            _flush(run, metrics, tokens_per_step, flops)
            stopping = stop.wanted_by_any(ranks)
            if due["eval_every"]:
                metrics.write([{"kind": "eval", "step": run.step, **evaluate.validate(run.loss, valid, recipe, ranks)}])
            if due["diagnostics_every"] and recipe.diagnostics_every:
                looked = evaluate.look_inside(run.loss, valid, recipe, ranks)
                metrics.write([{"kind": "diagnostics", "step": run.step, **looked}])
            if due["checkpoint_every"] or stopping:
                checkpoints.save(run.step, run.state())
            if stopping and not last:
                checkpoints.finish()
                raise Stopped(f"stopped at step {run.step}; the same command goes on from there")
            if due["eval_every"] or due["checkpoint_every"]:
                metrics.restart_clock()
        checkpoints.poll()
    checkpoints.finish()
    export_model(run.model, run.batches.dataset.folder, out / "model", ranks)
    seconds = time.perf_counter() - began
    metrics.write([{"kind": "done", "step": run.step, "tokens": recipe.tokens, "seconds": seconds}])


_INTERVALS = ("log_every", "eval_every", "checkpoint_every", "diagnostics_every")


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
    total = torch.zeros((), device=ranks.device)
    for number, batch in enumerate(loaded):
        inputs = {name: _to_device(tensor, ranks.device) for name, tensor in batch.items()}
        with accumulating(run.loss, last=number == len(loaded) - 1), arithmetic(recipe, ranks.device):
            loss = run.loss(**inputs)
            # Ranks average their gradients, so each counts its share of the global mean that many times.
            (loss * (ranks.world / targets.item())).backward()
        total += loss.detach()
    if ranks.world > 1:
        dist.all_reduce(total)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    norm = gradient_norm(gradients)
    target = run.zclip(norm) if recipe.zclip else norm.double()
    scale_gradients(gradients, norm, target)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    clipped = (target < norm.double()).double()
    return {"loss": total / targets.item(), "grad_norm": norm, "grad_norm_clipped": target, "clipped": clipped}


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _build(config: GvaConfig, recipe: Recipe, dataset: TokenDataset, ranks: Ranks) -> Run:
    torch.manual_seed(recipe.seed)
    config = GvaConfig.from_dict(config.to_dict())
    config._attn_implementation = "sdpa"
    model = GvaForCausalLM(config).to(ranks.device)
    model.train()
    loss = parallelize(model, recipe, ranks)
    batches = Batches(dataset, recipe.length, recipe.global_batch, recipe.order_seed, recipe.document_mask)
    return Run(config, recipe, ranks, model, loss, make_optimizer(model, recipe), ZClip(ranks.device), batches)


def _check_fit(config: GvaConfig, recipe: Recipe, dataset: TokenDataset) -> None:
    check(
        dataset.vocab_size <= config.vocab_size,
        "vocab_size",
        config.vocab_size,
        f"the data has {dataset.vocab_size} tokens",
    )
    limit = config.max_position_embeddings
    check(recipe.length <= limit, "length", recipe.length, f"exceeds max_position_embeddings={limit}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check(recipe.global_batch % world == 0, "global_batch", recipe.global_batch, f"must be a multiple of {world} ranks")


def _claim(out: Path, config: GvaConfig, recipe: Recipe, dataset: TokenDataset) -> None:
    """Record what this run is, or refuse to go on with another run's checkpoints."""
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    identity = {"model": model, "recipe": recipe.identity(), "data": dataset.fingerprint}
    record = out / RUN
    if record.is_file():
        theirs = json.loads(record.read_text())["identity"]
        flat = [_flatten(json.loads(json.dumps(x))) for x in (theirs, identity)]
        changed = [
            f"{k}: {flat[0].get(k)!r} -> {flat[1].get(k)!r}"
            for k in flat[0] | flat[1]
            if flat[0].get(k) != flat[1].get(k)
        ]
        if changed:
            raise ValueError(
                f"{out}: holds a run that differs in {'; '.join(sorted(changed))}; give the same settings to resume "
                "it, or another --out"
            )
    versions = {"gva": gva.__version__, "torch": torch.__version__}
    content = {"identity": identity, "recipe": asdict(recipe), "versions": versions}
    write_atomically(record, json.dumps(content, indent=2))


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flatten(value, f"{prefix}.{key}".strip(".")).items()}


def _flush(run: Run, metrics: Metrics, tokens_per_step: int, flops: float) -> None:
    try:
        metrics.flush(tokens_per_step, flops, run.ranks.world)
    except NonFiniteLoss as error:
        step = int(str(error).rsplit(" ", 1)[-1])
        raise NonFiniteLoss(
            f"{error}: stopped; its batch was the sequences {run.batches.indices(step - 1)} of "
            f"{run.batches.dataset.folder}. Try a lower lr, a longer warmup, zclip=true or precision=fp32; the last "
            "whole checkpoint is from before it"
        ) from None


class _StopRequest:
    """Ctrl-C and a scheduler's SIGTERM ask for a checkpoint and an end; a second one ends at once."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not the main thread: then nobody sends us signals either
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.wanted = True
        signal.signal(number, signal.SIG_DFL)

    def wanted_by_any(self, ranks: Ranks) -> bool:
        flag = torch.tensor(float(self.wanted))
        if ranks.world > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks.side)
        return bool(flag)
