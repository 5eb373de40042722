"""The paper's five tasks: where their rows lie, and the text that a model scores for each row.

A row has the fields of the dataset on the hub; a local file may also hold the short form
`{"question", "choices": [text, ...], "label": index}`. The text of an item is that of the tasks of the same name in
lm-evaluation-harness, zero-shot.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gva.data.documents import COMPRESSIONS, DataError, optional, read_rows
from gva.errors import check, check_choice

LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Item:
    """One question: a model scores the continuation of each choice, given its context."""

    pairs: list[tuple[str, str]]  # context and continuation of each choice
    lengths: list[int]  # of the choices in characters: acc_norm divides by them
    gold: int


@dataclass(frozen=True)
class Task:
    name: str
    file: str  # what a local file of the evaluated split is called, without .jsonl
    dataset: str  # on the hub
    config: str | None
    split: str
    normalised: bool  # whether lm-evaluation-harness defines acc_norm for it
    item: Callable[[dict[str, Any]], Item]
    question: str = ""  # the hub's name for what the short form calls "question"


def _choices(context: str, endings: list[str], gold: int) -> Item:
    return Item([(context, f" {ending}") for ending in endings], [len(ending) for ending in endings], gold)


def _hellaswag(row: dict[str, Any]) -> Item:
    context = _without_markup(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return _choices(context, [_without_markup(ending) for ending in row["endings"]], int(row["label"]))


def _without_markup(text: str) -> str:
    """WikiHow's part of HellaSwag has [title], [step] and the like in it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _winogrande(row: dict[str, Any]) -> Item:
    """One ending, scored after each of the two names."""
    before, _, after = row["sentence"].partition("_")
    contexts = [before + row[option] for option in ("option1", "option2")]
    pairs = [(context, f" {after.strip()}") for context in contexts]
    return Item(pairs, [len(context) for context in contexts], int(row["answer"]) - 1)


def _openbookqa(row: dict[str, Any]) -> Item:
    gold = row["choices"]["label"].index(row["answerKey"].lstrip())
    return _choices(row["question_stem"], row["choices"]["text"], gold)


def _arc(row: dict[str, Any]) -> Item:
    gold = row["choices"]["label"].index(row["answerKey"])
    return _choices(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], gold)


_ALL = (
    Task("hellaswag", "hellaswag_val", "Rowan/hellaswag", None, "validation", True, _hellaswag),
    Task("winogrande", "winogrande_xl_dev", "allenai/winogrande", "winogrande_xl", "validation", False, _winogrande),
    Task("openbookqa", "openbookqa_test", "allenai/openbookqa", "main", "test", True, _openbookqa, "question_stem"),
    Task("arc_easy", "arc_easy_test", "allenai/ai2_arc", "ARC-Easy", "test", True, _arc, "question"),
    Task("arc_challenge", "arc_challenge_test", "allenai/ai2_arc", "ARC-Challenge", "test", True, _arc, "question"),
)
TASKS = {task.name: task for task in _ALL}


def chosen_tasks(names: str) -> list[Task]:
    """The tasks of a comma-separated list; 'paper' stands for all five."""
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        check_choice("tasks", name, [*TASKS, "paper"])
    wanted = [task for name in listed for task in (TASKS if name == "paper" else [name])]
    return [TASKS[name] for name in dict.fromkeys(wanted)]


def load_rows(task: Task, data_dir: Path | None, limit: int = 0) -> list[dict[str, Any]]:
    """The first `limit` rows (0: all) in the hub's fields: from a local file, or without a folder from the hub."""
    check(limit >= 0, "limit", limit, "must be a number of items; 0 takes all of them")
    rows = _hub_rows(task) if data_dir is None else _local_rows(task, data_dir)
    found = list(islice(rows, limit or None))
    if not found:
        raise DataError(f"{task.name}: no items in {data_dir or task.dataset}")
    return found


def items_of(task: Task, rows: list[dict[str, Any]]) -> list[Item]:
    """What a model is to score, for each row."""
    return [_item(task, row, f"{task.name}: row {number}") for number, row in enumerate(rows, 1)]


def _item(task: Task, row: dict[str, Any], place: str) -> Item:
    try:
        item = task.item(row)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: not an item of {task.name} ({error!r}; it has {sorted(row)})") from error
    if not 0 <= item.gold < len(item.pairs):
        raise DataError(f"{place}: its answer is number {item.gold} of {len(item.pairs)} choices")
    return item


def find_file(task: Task, data_dir: Path) -> Path:
    names = [f"{stem}.jsonl{suffix}" for stem in (task.file, task.name) for suffix in ("", *COMPRESSIONS)]
    found = next((data_dir / name for name in names if (data_dir / name).is_file()), None)
    if found is None:
        raise DataError(
            f"{data_dir}: no file for {task.name}; expected {task.file}.jsonl or {task.name}.jsonl, plain or "
            f"{', '.join(COMPRESSIONS)}"
        )
    return found


def _local_rows(task: Task, data_dir: Path) -> Iterator[dict[str, Any]]:
    path = find_file(task, data_dir)
    for number, row in read_rows(path):
        full = _from_short_form(task, row) if isinstance(row.get("choices"), list) else row
        _item(task, full, f"{path}: line {number}")  # a bad line is told by its number
        yield full


def _from_short_form(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    """`{"question", "choices", "label"}` in the fields of the hub."""
    label, letters = row.get("label"), list(LETTERS[: len(row["choices"])])
    answer = letters[label] if isinstance(label, int) and 0 <= label < len(letters) else label
    choices = {"text": row["choices"], "label": letters}
    return {"id": row.get("id"), task.question: row.get("question"), "choices": choices, "answerKey": answer}


def _hub_rows(task: Task) -> Iterator[dict[str, Any]]:
    otherwise = "; or give local files with --data-dir"
    datasets = optional("datasets", "eval", f"{task.name}: fetching {task.dataset}", otherwise)
    try:
        yield from datasets.load_dataset(task.dataset, task.config, split=task.split)
    except (OSError, ValueError) as error:  # no network, offline mode, no such dataset
        raise DataError(
            f"{task.name}: {task.dataset} could not be fetched ({error}); give local files with --data-dir"
        ) from error
