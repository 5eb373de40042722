"""One finished run, read back from its folder; what is not a number, or not what its kind of line has, is left out."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gva.config import VARIANTS, GvaConfig
from gva.run.folder import RUN, read_run
from gva.run.metrics import read_metrics
from gva.study.matrix import read_row

TASKS = {
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "openbookqa": "OBQA",
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
}


@dataclass(frozen=True)
class Run:
    """One finished run."""

    row: str
    of: str  # the row that a sweep's row is a learning rate of; else the row itself
    order: int  # where the row stood in its matrix
    data: str  # a name for what it was trained on, where known
    folder: Path
    identity: dict[str, dict[str, Any]]
    versions: dict[str, str]
    lines: list[dict[str, Any]] = field(repr=False)
    damaged: tuple[str, ...] = ()  # the kinds of lines that are left out

    @property
    def seed(self) -> int:
        return self.identity["recipe"]["seed"]

    @property
    def lr(self) -> float:
        return self.identity["recipe"]["lr"]

    @property
    def config(self) -> GvaConfig:
        return GvaConfig.from_dict(dict(self.identity["model"]))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def unusable(self) -> str:
        """Why a finished run has no result, or nothing."""
        if "eval" in self.damaged:
            return "its validation loss is not a number"
        if not self.of_kind("eval"):
            return "there is no validation loss in its metrics"
        return "" if self.last_eval["step"] == self.steps else "the validation loss at its end is lost"

    @cached_property
    def steps(self) -> int:
        return self.of_kind("done")[-1]["step"]

    @cached_property
    def tokens(self) -> int:
        return self.of_kind("done")[-1]["tokens"]

    @property
    def tokens_per_step(self) -> int:
        return self.identity["recipe"]["global_batch"] * self.identity["recipe"]["length"]

    @cached_property
    def last_eval(self) -> dict[str, Any]:
        return self.of_kind("eval")[-1]

    @property
    def valid_loss(self) -> float:
        return self.last_eval["valid_loss"]

    @property
    def tokens_per_second(self) -> float | None:
        """The median over its steps, where they are timed."""
        timed = [line["tokens_per_second"] for line in self.of_kind("step") if "tokens_per_second" in line]
        return statistics.median_high(timed) if timed else None

    @cached_property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Task accuracies at the end of training; empty where none were measured then."""
        last = [line for line in self.of_kind("tasks") if line["step"] == self.steps]
        return last[-1]["results"] if last else {}


def score(result: dict[str, Any]) -> float:
    """The accuracy that a task is compared by: length-normalised where lm-eval defines that, else plain."""
    return result["acc"] if result.get("acc_norm") is None else result["acc_norm"]


def standard_error(result: dict[str, Any]) -> float | None:
    """Of that accuracy, over the items; of one item there is none."""
    return result.get("acc_stderr" if result.get("acc_norm") is None else "acc_norm_stderr")


def speed_conditions(line: dict[str, Any]) -> tuple[Any, ...]:
    """What decode speeds must have in common to be compared; a line without them is a reason for having none."""
    return tuple(line.get(name) for name in ("gpu", "torch", "dtype", "batch", "context"))


def read_runs(folder: Path) -> Iterator[Run]:
    """Every run under a folder, finished or not."""
    for record in sorted(folder.rglob(RUN)):
        out = record.parent.resolve()
        content, row = read_run(out), read_row(out)
        name = row.get("name", out.parent.name if out.name.startswith("seed-") else out.name)
        of, order = row.get("of", name), row.get("order", len(VARIANTS))
        data = row.get("data") or str(content.get("data", ""))
        lines = read_metrics(out)
        damaged = tuple(sorted({line["kind"] for line in lines if not _is_sound(line)}))
        sound = [line for line in lines if _is_sound(line)]
        yield Run(name, of, order, data, out, content["identity"], content.get("versions", {}), sound, damaged)


# What a line of a kind has, by an example: a list's first element and the value of "*" stand for all.
_SHAPES: dict[str, dict[str, Any]] = {
    "step": {"loss": 0.0},
    "eval": {"valid_loss": 0.0, "bits_per_byte": 0.0, "valid_tokens": 0, "loss_by_position": [0.0]},
    "teacher": {"valid_loss": 0.0},
    "diagnostics": {"first_copy_loss": 0.0, "second_copy_loss": 0.0, "previous_token_attention": [[0.0]]},
    "tasks": {"tokens": 0, "results": {"*": {"acc": 0.0, "items": 0}}},
    "decode": {
        "tokens_per_second": 0.0, "step_ms": 0.0, "cache_bytes": 0, "batch": 0, "context": 0, "attention": "",
        "gpu": "", "torch": "", "dtype": "",
    },
    "done": {"tokens": 0},
}  # fmt: skip
_NO_SPEED = {"reason": ""}  # of a decode line instead
_IF_ANY = ("acc_norm", "acc_stderr", "acc_norm_stderr", "chance")  # a number or none in the results of a task


def _is_sound(line: dict[str, Any]) -> bool:
    shape = _NO_SPEED if line["kind"] == "decode" and "reason" in line else _SHAPES.get(line["kind"], {})
    if not _has_shape(line, shape) or not _is_finite(line):
        return False
    if line["kind"] == "decode":
        return "reason" in line or line["tokens_per_second"] > 0
    results = line["results"].values() if line["kind"] == "tasks" else []
    return all(type(result.get(name)) in (int, float, type(None)) for result in results for name in _IF_ANY)


def _has_shape(value: Any, example: Any) -> bool:
    if isinstance(example, list):
        return isinstance(value, list) and bool(value) and all(_has_shape(item, example[0]) for item in value)
    if isinstance(example, dict):
        named = dict.fromkeys(value, example["*"]) if "*" in example and isinstance(value, dict) else example
        return isinstance(value, dict) and all(_has_shape(value.get(name), part) for name, part in named.items())
    return isinstance(value, str) if isinstance(example, str) else type(value) in (int, float)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
