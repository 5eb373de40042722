"""lm-evaluation-harness on a model of ours: its tasks, its prompts, its metrics.

With local files only the dataset of a stock task is replaced; the rest of its definition stays.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from gva.evaluate.results import METRICS, Scored, check_scores
from gva.evaluate.tasks import Task, load_rows

INSTALL = "pip install 'grouped-value-attention[eval]'"


def evaluate_with_harness(
    model: Any,
    tokenizer: Any,
    tasks: list[Task],
    data_dir: Path | None = None,
    limit: int = 0,
    batch: int = 16,
) -> dict[str, Scored]:
    """Run stock tasks, zero-shot, on the hub's data or on the files of `data_dir`."""
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        # Its default rounds log-probabilities to the precision of the logits, too coarse to compare choices in bf16.
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, softmax_dtype="float32")
        wanted: list[Any] = [task.name for task in tasks]
        if data_dir is not None:  # only inside a group does a definition given here extend the stock one
            wanted = [{"group": "gva_local", "task": [_on_files(task, data_dir, limit) for task in tasks]}]
        # No seeds: nothing is drawn, and a caller's random state is not ours to set.
        seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        how = {"num_fewshot": 0, "limit": limit or None, "task_manager": _stock_tasks(), **seeds}
        report = simple_evaluate(model=wrapped, tasks=wanted, **how)
    return {task.name: _read(task, report) for task in tasks}


def check_installed() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise OSError(f"engine lm-eval needs: {INSTALL} ({error}); engine own does without") from error


@cache
def _stock_tasks() -> Any:
    """Its index of thousands of definitions, seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave of what it says its errors, and of the bars the one that shows how far it is."""
    import datasets

    log, bars = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level = log.level
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def _on_files(task: Task, data_dir: Path, limit: int) -> dict[str, Any]:
    """The stock definition of a task with the rows of a local file for its dataset."""
    import datasets

    rows = load_rows(task, data_dir, limit)

    def local(**ignored: Any) -> Any:
        return datasets.DatasetDict({task.split: datasets.Dataset.from_list(rows)})

    splits = dict.fromkeys(("training_split", "validation_split", "test_split"))
    evaluated = "test_split" if task.split == "test" else "validation_split"
    return {"task": task.name, "custom_dataset": local, **splits, evaluated: task.split}


def _read(task: Task, report: dict[str, Any]) -> Scored:
    numbers = report["results"][task.name]
    samples = sorted(report["samples"][task.name], key=lambda sample: sample["doc_id"])
    pairs = [[tuple(pair) for pair in sample["arguments"]] for sample in samples]
    found = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
    check_scores(task.name, found)
    names = [name for metric in METRICS for name in (metric, f"{metric}_stderr")]
    given = {name: numbers.get(f"{name},none") for name in names}  # its word for no filter; "N/A" where there is none
    result = {name: float(value) if isinstance(value, float | int) else None for name, value in given.items()}
    chance = sum(1 / len(item) for item in pairs) / len(pairs)
    return Scored(result | {"chance": chance, "items": len(pairs)}, found, pairs)
