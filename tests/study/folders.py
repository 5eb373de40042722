"""Run folders as a comparison leaves them, written by hand: fast, and with numbers that a test knows."""

import json
from dataclasses import asdict
from pathlib import Path

from gva.config import VARIANTS
from gva.study.matrix import Matrix, Row, write_row

DATA = {"train": "0123456789abcdef", "valid": "fedcba9876543210"}
TASKS = {"hellaswag": 0.25, "winogrande": 0.5, "openbookqa": 0.25, "arc_easy": 0.25, "arc_challenge": 0.25}

SPEED = {
    "tokens_per_second": 1000.0, "step_ms": 2.0, "batch": 2, "context": 256, "cache_bytes": 2**29, "dtype": "bfloat16",
    "attention": "triton", "gpu": "H200", "torch": "2.11.0", "commit": "abc", "beside_gib": 0.6,
}  # fmt: skip


def write_run(
    out: Path,
    name: str,
    seed: int,
    loss: float,
    *,
    variant: str | None = None,
    fields: dict | None = None,
    of: str | None = None,
    data: dict | None = None,
    valid_tokens: int = 4096,
    done: bool = True,
    tasks: dict | None = None,
    items: int = 1000,
    steps: int = 40,
    versions: dict | None = None,
) -> Path:
    """One run whose validation loss falls to `loss`; `tasks` maps a task to its final accuracy."""
    row = Row(name, variant or name, (seed,), {"steps": steps, **(fields or {})}, of)
    config, recipe = row.build("demo", seed)
    folder = out / "runs" / name / f"seed-{seed}"
    folder.mkdir(parents=True)
    position = list(VARIANTS).index(row.variant)
    write_row(folder.parent, Matrix("demo", (*[Row("", "gqa", (0,))] * position, row)), row)
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    identity = {"model": model, "recipe": recipe.identity(), "data": data or DATA}
    record = {"identity": identity, "recipe": asdict(recipe), "versions": versions or {"torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(record))
    tokens_per_step = recipe.global_batch * recipe.length
    lines = list(_lines(loss, seed, steps, tokens_per_step, valid_tokens, config, tasks or {}, items))
    if done:
        lines.append({"kind": "done", "step": steps, "tokens": recipe.tokens})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _lines(loss, seed, steps, tokens_per_step, valid_tokens, config, tasks, items):
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    for step in range(1, steps + 1):
        now = loss + 3 * (1 - step / steps) + 0.01 * ((step * 7 + seed) % 5 - 2)
        tokens = step * tokens_per_step
        yield {"kind": "step", "step": step, "loss": now, "lr": 1e-3, "tokens": tokens, "tokens_per_second": 1e4}
        if step % (steps // 4) == 0:
            late = loss + 3 * (1 - step / steps)
            bins = [late + 0.1 - 0.01 * i for i in range(16)]
            score = bins[-1] - bins[1]
            yield {
                "kind": "eval", "step": step, "valid_loss": late, "bits_per_byte": late / 2,
                "valid_tokens": valid_tokens, "loss_by_position": bins, "in_context_score": score,
            }  # fmt: skip
            scales = {"q_nope": 1.0, "k_nope": 0.5 + 0.1 * seed, "q_rope": 1.0, "k_rope": 1.0, "v": 1.0}
            yield {
                "kind": "diagnostics", "step": step, "first_copy_loss": 7.0, "second_copy_loss": 7.0 - step / steps,
                "previous_token_attention": [[0.1] * heads] * layers, "qk_scales": [scales] * layers,
            }  # fmt: skip
            if tasks:
                yield {"kind": "tasks", "step": step, "tokens": tokens, "results": _tasks(tasks, step / steps, items)}


def _tasks(final, progress, items):
    results = {}
    for name, accuracy in final.items():
        now = TASKS[name] + (accuracy - TASKS[name]) * progress
        norm = None if name == "winogrande" else now
        results[name] = {
            "acc": now - (0 if norm is None else 0.02), "acc_stderr": 0.01, "acc_norm": norm,
            "acc_norm_stderr": None if norm is None else 0.01, "chance": TASKS[name], "items": items,
        }  # fmt: skip
    return results
