"""The commands that are ended on purpose, and what must be true of a folder when the same command has run again."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.injector import FULL, KILL, Injector, Outcome
from gva.data.tokenizer import train_bpe
from gva.run.metrics import read_metrics

MODEL = [
    "hidden_size=32", "intermediate_size=64", "num_hidden_layers=1", "num_attention_heads=2", "value_head_dim=32",
    "length=32", "global_batch=2", "micro_batch=2", "eval_every=4", "eval_sequences=2", "log_every=2", "warmup=2",
    "checkpoint_every=2", "diagnostics_every=0",
]  # fmt: skip
STEPS = ["--steps", "6"]


@dataclass(frozen=True)
class Job:
    """A command over a folder; `before` are the commands that made what it starts from, `spoil` what came over it."""

    name: str
    words: Callable[[Path, Path], list[str]]  # of the folder and of the inputs
    left: Callable[[Path], Any]  # what a folder holds that must not depend on kills
    before: tuple["Job", ...] = ()
    spoil: Callable[[Path], None] = lambda folder: None

    def __str__(self) -> str:
        return self.name


def tree(folder: Path) -> dict[str, bytes]:
    """Every file, hidden and left-over ones too, but for the locks that a next process takes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def trained(folder: Path) -> dict[str, Any]:
    """What training left: the numbers of metrics that are not times, the weights, nothing half-written."""
    found: dict[str, Any] = {}
    for run in sorted(path.parent for path in folder.rglob("run.json")):
        name = str(run.relative_to(folder))
        found[f"{name}: metrics"] = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(run)]
        for part in ("checkpoints", "model"):
            found |= {f"{name}/{part}/{file}": content for file, content in tree(run / part).items() if part == "model"}
            found[f"{name}: {part}"] = sorted(path.name for path in (run / part).glob("*"))
        found[f"{name}: files"] = sorted(path.name for path in run.glob("*") if path.is_file() and path.name != ".lock")
    return found


TIMES = ("tokens_per_second",)


def reported(folder: Path) -> dict[str, Any]:
    """What a comparison left: its runs, and its report but for what depends on the clock."""
    names = sorted(path.name for path in (folder / "report").rglob("*"))
    return {**trained(folder), "report": names}


def _prepare(folder: Path, inputs: Path) -> list[str]:
    files = [str(inputs / name) for name in ("a.jsonl", "b.jsonl")]
    return ["data", "prepare", *files, "--out", str(folder), "--vocab-size", "300", "--workers", "1"]


def _prepare_text(folder: Path, inputs: Path) -> list[str]:
    return ["data", "prepare", str(inputs / "c.txt"), "--out", str(folder), "--vocab-size", "300"]


def _damage(folder: Path) -> None:
    """Of every kind of file one: a shard cut short, another's ends gone, another tokenizer, half an index."""
    tokens, index = folder / "train-00000.tokens", folder / "index.json"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    index.write_bytes(index.read_bytes()[:500])
    (folder / "train-00001.documents").unlink()
    train_bpe(["quite another text"], 280).save(folder / "tokenizer")


def _train(folder: Path, inputs: Path) -> list[str]:
    where = ["--data", str(inputs / "prepared"), "--out", str(folder), "--device", "cpu"]
    return ["train", "--preset", "demo", "--variant", "gva-drope-16", *where, *STEPS, *MODEL]


def _compare(folder: Path, inputs: Path) -> list[str]:
    where = ["--data", str(inputs / "prepared"), "--out", str(folder), "--device", "cpu"]
    return ["compare", "--preset", "demo", "--variants", "gqa,gva-drope-16", "--seeds", "1", *where, *STEPS, *MODEL]


def _archive(folder: Path, inputs: Path) -> list[str]:
    return ["report", str(inputs / "compared"), "--out", str(folder / "report"), "--archive", str(folder / "kept")]


PREPARE = Job("prepare", _prepare, tree)
AGAIN = Job("prepare again", _prepare, tree, (PREPARE,))
MEND = Job("prepare what is damaged", _prepare, tree, (PREPARE,), _damage)
TEXT = Job("prepare a text", _prepare_text, tree)
TRAIN = Job("train", _train, trained)
COMPARE = Job("compare", _compare, reported)
ARCHIVE = Job("archive", _archive, lambda folder: tree(folder / "kept"))
JOBS = (PREPARE, AGAIN, MEND, TEXT, TRAIN, COMPARE, ARCHIVE)


def spread(operations: int, most: int) -> list[tuple[int, bool]]:
    """Up to `most` of the operations, evenly, each before it is done and halfway through it."""
    every = [(at, half) for at in range(1, operations + 1) for half in (False, True)]
    chosen = min(most, len(every))
    return [every[i * len(every) // chosen] for i in range(chosen)]


def write_inputs(injector: Injector, inputs: Path) -> Path:
    """Two files of documents, a text, a folder prepared from the former, and a comparison of two runs on that."""
    inputs.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(200)]
    for name in ("a.jsonl", "b.jsonl"):
        texts = [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(300)]
        (inputs / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (inputs / "c.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=60)) for _ in range(200)))
    for job, folder in ((PREPARE, inputs / "prepared"), (COMPARE, inputs / "compared")):
        must(injector.run(job.words(folder, inputs), folder))
    return inputs


class Trial:
    """A job, what it leaves when nothing happens, and tries in which something does."""

    def __init__(self, injector: Injector, job: Job, inputs: Path, scratch: Path) -> None:
        self.injector, self.job, self.inputs, self.scratch = injector, job, inputs, scratch
        self.start, whole = scratch / "start", scratch / "whole"
        for folder in (self.start, whole):
            folder.mkdir(parents=True)
        for earlier in job.before:
            must(injector.run(earlier.words(self.start, inputs), self.start))
        job.spoil(self.start)
        shutil.copytree(self.start, whole, dirs_exist_ok=True)
        self.operations = must(injector.run(job.words(whole, inputs), whole)).operations
        self.expected = job.left(whole)

    def fails_at(self, at: int, half: bool, mode: int = KILL, then: int = 0) -> str:
        """Let operation `at` fail, and of a second try operation `then`; run the command again. Returns what is wrong
        in the end, or nothing."""
        folder = self.scratch / "try"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.start, folder)
        words = self.job.words(folder, self.inputs)
        first = self.injector.run(words, folder, at, half, mode)
        if mode == KILL and first.code != -9 and first.operations >= at:
            return f"ended with {first.code} instead of being killed: {first.said}"
        if mode == FULL and "Traceback" in first.said:
            return f"a full disk ends in a traceback: {first.said}"
        if then:
            self.injector.run(words, folder, then)
        again = self.injector.run(words, folder)
        if again.code:
            return f"run again it ends with {again.code}: {again.said}"
        left = self.job.left(folder)
        wrong = [name for name in left.keys() | self.expected.keys() if left.get(name) != self.expected.get(name)]
        return f"differs in {sorted(wrong)}" if wrong else ""


def must(outcome: Outcome) -> Outcome:
    if outcome.code:
        raise RuntimeError(f"ended with {outcome.code}: {outcome.said}")
    return outcome
