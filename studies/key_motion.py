"""How far training moves the content keys of GQA and GVA, and which matrix moves them.

    python studies/key_motion.py --data DATA --csv results/key-motion.csv

Trains the `small` preset at several widths and looks, on held-out text, at stretches of a few steps: the change of the
keys, over the keys, that comes from one matrix alone, its input held still. GQA has one such matrix, k_proj; GVA has
the maps, and the projection of the values that they read. The rate at which maps would move keys as far as k_proj does
is the ratio of the two: what `map_lr` stands for, were far to be what matters.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gva.attention import Attention
from gva.attention.gva import rebuild_keys
from gva.data.batches import Batches
from gva.data.shards import TokenDataset
from gva.diagnostics import observe
from gva.model import GvaForCausalLM
from gva.run.folder import commit
from gva.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from gva.train.recipe import build, read_overrides

Motion = tuple[int, str, float, float, float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--csv", type=Path, required=True, help="rows are appended")
    parser.add_argument("--variants", default="gqa,gva-drope-16")
    parser.add_argument("--widths", default="256,512,768", help="of the model; heads of 64, a quarter of them groups")
    parser.add_argument("--at", default="100,200,300", help="steps after which a stretch begins")
    parser.add_argument("--stretch", type=int, default=10, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("fields", nargs="*", help="key=value of the model or the recipe")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    for width in map(int, arguments.widths.split(",")):
        for variant in arguments.variants.split(","):
            for row in follow(variant, width, arguments):
                append(arguments.csv, row)


def follow(variant: str, width: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train one model and look at its stretches."""
    heads = width // 64
    sizes = {
        "hidden_size": width, "num_attention_heads": heads, "num_value_groups": max(1, heads // 4),
        "intermediate_size": 64 * round(width * 2.75 / 64),
    }  # fmt: skip
    source = commit()  # now: what lies in the folder later is not what runs
    train_set = TokenDataset(arguments.data)
    fields = {**sizes, **read_overrides(None, arguments.fields)}
    config, recipe = build("small", variant, fields, train_set.index["vocab_size"])
    torch.manual_seed(recipe.seed)
    model = GvaForCausalLM(config).to(arguments.device)
    optimizer = make_optimizer(model, recipe)
    batches = Batches(train_set, recipe.length, recipe.global_batch, recipe.order_seed)
    valid = Batches(TokenDataset(arguments.data, "valid"), recipe.length, 1, 0)
    text = valid.load(list(range(4)))["input_ids"].to(arguments.device)
    begins = sorted({int(step) for step in arguments.at.split(",")})
    if any(b - a < arguments.stretch for a, b in pairwise(begins)):
        raise SystemExit(f"--at {arguments.at}: stretches of {arguments.stretch} steps would overlap")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(max(begins) + arguments.stretch):
        set_learning_rate(optimizer, learning_rate(recipe, step))
        loss = descend(model, optimizer, batches, step, arguments.device)
        done = step + 1
        if done - arguments.stretch in begins:
            for layer, part, moved, keys, values in motions(model, text, before):
                yield {
                    "variant": variant, "width": width, "groups": config.num_value_groups, "map_lr": recipe.map_lr,
                    "lr": recipe.lr, "layers": config.num_hidden_layers,
                    "tokens_per_step": batches.batch * batches.length,
                    "step": done - arguments.stretch, "stretch": arguments.stretch, "layer": layer, "part": part,
                    "motion": moved / keys, "keys": keys, "values": values, "loss": loss,
                    "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
                    "torch": torch.__version__, "commit": source,
                }  # fmt: skip
            print(f"{variant} {width}: step {done}, loss {loss:.3f}", file=sys.stderr, flush=True)
        if done in begins:
            before = {name: p.detach().clone() for name, p in model.named_parameters()}


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, step: int, device: str) -> float:
    batch = {name: tensor.to(device) for name, tensor in batches.load(batches.indices(step)).items()}
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(batch["input_ids"], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def motions(
    model: nn.Module, text: Tensor, before: dict[str, Tensor]
) -> Iterator[tuple[int, str, float, float, float]]:
    """Layer, matrix, RMS of what its change since `before` does to the content keys, RMS of keys, RMS of values."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}

    def look(module: Attention, hidden: Tensor, rotation: Any) -> tuple[str, Attention, Tensor]:
        return names[module], module, hidden.float()

    for layer, (name, module, hidden) in enumerate(observe(model, lambda: model(text, use_cache=False), look)):

        def old_and_change(part: str, module: Attention = module, name: str = name) -> tuple[Tensor, Tensor]:
            old = before[f"{name}.{part}.weight"]
            return old, getattr(module, part).weight - old

        width = module.config.value_head_dim
        project, moved_project = old_and_change("v_proj")
        values = hidden @ project.T
        if hasattr(module, "k_proj"):
            key, moved_key = old_and_change("k_proj")
            yield layer, "k_proj", rms(hidden @ moved_key.T), rms(hidden @ key.T), rms(values)
            continue
        maps, moved_maps = old_and_change("key_map")
        keys = rms(rebuild(values, maps, module, width))
        yield layer, "key_map", rms(rebuild(values, moved_maps, module, width)), keys, rms(values)
        yield layer, "v_proj", rms(rebuild(hidden @ moved_project.T, maps, module, width)), keys, rms(values)


def rebuild(values: Tensor, maps: Tensor, module: Any, width: int) -> Tensor:
    return rebuild_keys(values.unflatten(-1, (-1, width)), maps.unflatten(0, (-1, module.config.content_dim)))


def rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if fresh:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
