"""`gva eval`: accuracies of a checkpoint on the paper's tasks, and its validation loss."""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="zero-shot task accuracies and validation loss of a checkpoint")
    parser.add_argument("checkpoint", type=Path, help="a model folder, a run, or RUN/checkpoints/step-...")
    parser.add_argument("--tasks", default="paper", help="paper (all five), a comma-separated list, or none")
    parser.add_argument("--data-dir", type=Path, help="folder of the tasks' jsonl files; without it, from the hub")
    parser.add_argument("--engine", default="own", choices=["own", "lm-eval", "both"], help="who scores (own)")
    parser.add_argument("--limit", type=int, default=0, help="the first N items of each task; 0 takes all")
    parser.add_argument("--data", type=Path, help="a prepared folder: adds validation loss and bits per byte on it")
    parser.add_argument("--sequences", type=int, default=0, help="validation sequences; 0 takes all")
    parser.add_argument("--length", type=int, help="their length; by default the run's, or the model's context")
    parser.add_argument("--tokenizer", type=Path, help="where the checkpoint has none")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="by default as saved")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens in a forward pass, at most")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers, and which items were right")
    parser.add_argument(
        "--against", type=Path, help="such a file of another checkpoint: differences, paired over items"
    )
    parser.add_argument("--record", action="store_true", help="also write the accuracies into the run's metrics.jsonl")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from gva.data.publish import replace_section
    from gva.evaluate.against import compare, read_answers, told
    from gva.evaluate.loading import load_model
    from gva.evaluate.results import average, differences, table
    from gva.evaluate.validation import validation_loss
    from gva.run.atomic import write_atomically
    from gva.run.folder import MODEL, locked
    from gva.run.metrics import record
    from gva.train.card import SCORES, scores

    tasks, place, tokenizer, validation = _prepared(arguments)
    others = read_answers(arguments.against) if arguments.against else {}
    model = load_model(place, getattr(torch, arguments.dtype) if arguments.dtype else None, arguments.device)
    report: dict[str, Any] = {"kind": "tasks", "step": place.step, "tokens": place.tokens}
    report |= {"checkpoint": str(arguments.checkpoint), "engine": arguments.engine, "limit": arguments.limit}
    report |= {"device": model.device.type, "dtype": str(model.dtype).removeprefix("torch.")}
    if tasks:
        found, report["seconds"] = _score(arguments, model, tokenizer, tasks)
        scored = found.get("own") or found["lm-eval"]
        report["results"] = {name: task.result for name, task in scored.items()}
        report["average"] = average(report["results"])
        print(table(report["results"]))
        report["answers"] = {name: task.answers for name, task in scored.items() if task.answers}
        if others:
            report["against"] = {"file": str(arguments.against), **compare(report["answers"], others)}
            print(told(compare(report["answers"], others), arguments.against.name))
        if arguments.engine == "both":
            report["lm_eval"] = {name: task.result for name, task in found["lm-eval"].items()}
            report["differences"] = differences(found["own"], found["lm-eval"])
            print(_told(report["differences"]))
    if validation:
        report["validation"] = shown = validation_loss(model, validation, progress=sys.stderr.isatty())
        print(f"validation loss {shown['valid_loss']:.4f}, {shown['bits_per_byte']:.4f} bits per byte", end=" ")
        print(f"({shown['valid_tokens']:,} tokens in sequences of {shown['length']})")
    if arguments.out:
        write_atomically(arguments.out, json.dumps(report, indent=2) + "\n")
    if arguments.record and place.run:
        with locked(place.run):
            record(place.run, {name: report[name] for name in ("kind", "step", "tokens", "results")})
            replace_section(place.run / MODEL, SCORES, scores(place.run))
    return 0


def _prepared(arguments: argparse.Namespace) -> tuple[list[Any], Any, Any, Any]:
    """Tasks, the place of the model, its tokenizer for tasks, and what it is validated on. What cannot be done is told
    here, before the model is loaded."""
    from gva.errors import check
    from gva.evaluate.harness import check_installed
    from gva.evaluate.loading import check_data, config_of, find, load_tokenizer_of
    from gva.evaluate.tasks import chosen_tasks, items_of, load_rows
    from gva.evaluate.validation import open_validation

    tasks = [] if arguments.tasks == "none" else chosen_tasks(arguments.tasks)
    if not tasks and not arguments.data:
        raise ValueError("--tasks none: leaves nothing to do without --data")
    if arguments.against and (arguments.engine == "lm-eval" or not tasks):
        raise ValueError("--against: compares the tasks of --engine own")
    check(arguments.limit >= 0, "--limit", arguments.limit, "must be a number of items; 0 takes all of them")
    check(arguments.batch_tokens > 0, "--batch-tokens", arguments.batch_tokens, "must be positive")
    if arguments.out:
        _check_writable(arguments.out)
    place = find(arguments.checkpoint)
    if arguments.record and (place.run is None or place.step is None or not tasks):
        raise ValueError("--record: needs a run's checkpoint with a known step, and --tasks")
    config, tokenizer, validation = config_of(place), None, None
    if arguments.data:
        check_data(place, arguments.data)
        recipe = place.recipe
        length = arguments.length or recipe.get("length") or config.max_position_embeddings
        how = (length, recipe.get("document_mask", False), arguments.sequences, arguments.batch_tokens)
        validation = open_validation(config, arguments.data, *how)
    if tasks:
        tokenizer = load_tokenizer_of(place, config.vocab_size, arguments.tokenizer, arguments.data)
        if arguments.engine != "own":
            check_installed()
        if arguments.engine != "lm-eval" or arguments.data_dir:
            for task in tasks:
                items_of(task, load_rows(task, arguments.data_dir, arguments.limit))
    return tasks, place, tokenizer, validation


def _check_writable(out: Path) -> None:
    if out.is_dir():
        raise IsADirectoryError(f"--out {out}: is a folder; give the name of a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise PermissionError(f"--out {out}: its folder cannot be written to; give another")


def _score(arguments: argparse.Namespace, model: Any, tokenizer: Any, tasks: list[Any]) -> tuple[dict, dict]:
    """What each engine asked for found, by its name, and how long it took."""
    from gva.evaluate.harness import evaluate_with_harness
    from gva.evaluate.scoring import evaluate

    engines = {
        # It counts rows, not tokens; few items are longer than 512.
        "lm-eval": partial(evaluate_with_harness, batch=max(1, arguments.batch_tokens // 512)),
        "own": partial(evaluate, batch_tokens=arguments.batch_tokens, progress=sys.stderr.isatty()),
    }
    found, seconds = {}, {}
    for name in engines if arguments.engine == "both" else [arguments.engine]:
        started = time.perf_counter()
        found[name] = engines[name](model, tokenizer, tasks, arguments.data_dir, arguments.limit)
        seconds[name] = round(time.perf_counter() - started, 1)
    return found, seconds


def _told(differences: dict[str, dict[str, Any]]) -> str:
    lines = ["own against lm-eval:"]
    for name, found in differences.items():
        same = {metric: "the same" if found[f"same_{metric}"] else "NOT the same" for metric in ("acc", "acc_norm")}
        lines.append(
            f"  {name}: largest difference of {found['loglikelihoods']:,} loglikelihoods "
            f"{found['largest_difference']:.2e} nats, acc {same['acc']}, acc_norm {same['acc_norm']}"
            + ("" if found["same_text"] else ", the text NOT the same")
        )
    return "\n".join(lines)
