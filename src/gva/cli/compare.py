"""`gva compare`: train variants side by side, evaluate them, write the report."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="train variants side by side and write the report; run it again to go on after a stop"
    )
    what = compare.add_argument_group("what is compared")
    what.add_argument("--preset", help="size and recipe: demo, small, paper-350m")
    what.add_argument("--variants", help="comma-separated; by default five for demo, else gva and the paper's")
    what.add_argument("--seeds", type=int, help="how many, from 0 on; by default 1 for demo, 3 otherwise")
    what.add_argument("--steps", type=int)
    what.add_argument("--lr", action="append", default=[], metavar="VARIANT=RATE", help="a variant's own rate")
    what.add_argument("--lr-sweep", metavar="RATES", help="as 5e-4,1e-3,2e-3: every row at each, compared at its best")
    what.add_argument("--matrix", type=Path, help="a TOML file of named rows instead of --preset and --variants")
    what.add_argument("--models", type=Path, help="where the checkpoints of --matrix lie; by default beside it")
    what.add_argument("--baseline", help="the row that differences are taken against; by default gqa")
    what.add_argument(
        "--data", type=Path, help="a prepared folder, a text or a folder of texts; by default the standard library"
    )
    where = compare.add_argument_group("where and how")
    where.add_argument("--out", type=Path, help="folder for runs and report; by default comparison-PRESET")
    where.add_argument("--only", action="append", default=[], metavar="ROW[:SEED]", help="run these alone; repeatable")
    where.add_argument("--shard", metavar="I/N", help="run the I-th of N stretches of the matrix")
    where.add_argument("--ranks", type=int, default=1, help="processes per run, through torchrun")
    where.add_argument("--device", choices=["cpu", "cuda"])
    weights = where.add_mutually_exclusive_group()
    kept: dict[str, Any] = {"dest": "weights", "action": "store_const", "default": "model"}
    weights.add_argument("--keep-weights", const="all", **kept, help="keep the checkpoints of finished runs too")
    weights.add_argument("--no-weights", const="none", **kept, help="keep the metrics of finished runs alone")
    quick = "do not measure it, as is done on a GPU"
    where.add_argument("--no-decode-speed", dest="decode_speed", action="store_false", help=quick)
    where.add_argument("--fa3", type=Path, help="FlashAttention-3 for the decode speed of GQA; by default a vLLM's")
    where.add_argument("--decode-csv", type=Path, help="speed of the kernel to show too, as gva bench decode writes it")
    compare.add_argument(
        "overrides", nargs="*", metavar="key=value", help="any field of the recipe (gva train --help) or the model"
    )
    compare.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva.data.own import settle_data
    from gva.errors import check
    from gva.run.folder import refuse_foreign
    from gva.study.matrix import ROW, RUNS, choose
    from gva.study.runner import Runner

    matrix = _matrix(arguments)
    runs = choose(matrix, arguments.only, arguments.shard)
    check(bool(runs), "--shard", arguments.shard, "holds no run: the matrix has fewer runs than there are shards")
    if arguments.decode_csv is not None:
        from gva.report.panels import decode_speed

        decode_speed(arguments.decode_csv)  # what is wrong with it is told before the training, not after
    check(arguments.ranks > 0, "--ranks", arguments.ranks, "must be positive")
    if arguments.fa3 is not None:
        check(arguments.fa3.is_file(), "--fa3", str(arguments.fa3), "no such file; give vLLM's _vllm_fa3_C.abi3.so")
    out = arguments.out or Path(f"comparison-{arguments.matrix.stem if arguments.matrix else matrix.preset}")
    refuse_foreign(out, f"{RUNS}/*/{ROW}")
    how = {name: getattr(arguments, name) for name in ("device", "weights", "ranks", "decode_speed", "fa3")}
    outcome = Runner(matrix, settle_data(arguments.data, out, progress=False), out, **how).execute(runs)
    if outcome.stopped:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130
    for name, log in outcome.failed.items():
        print(f"\n{name} failed: {log}", file=sys.stderr)
    if outcome.failed:
        print(f"\n{len(outcome.failed)} of {len(runs)} runs failed; the same command tries them again", file=sys.stderr)
    if outcome.finished:
        from gva.cli.report import write
        from gva.run.files import within

        # The baseline may be in another part of the matrix, or have failed: what there is is still reported.
        write([out], within(out, "report"), matrix.baseline, arguments.decode_csv, baseline_needed=False)
    return 1 if outcome.failed else 0


def _matrix(arguments: argparse.Namespace) -> Any:
    from dataclasses import replace

    from gva.errors import check
    from gva.study.matrix import read_matrix, simple_matrix
    from gva.train.recipe import read_overrides

    overrides = read_overrides(None, arguments.overrides)
    if arguments.steps is not None:
        overrides["steps"] = arguments.steps
    if (arguments.matrix is None) == (arguments.preset is None):
        raise ValueError("give either --preset or --matrix")
    if arguments.matrix is not None:
        for name in ("variants", "seeds", "lr"):
            check(not getattr(arguments, name), f"--{name}", getattr(arguments, name), "is said in the --matrix file")
        matrix = read_matrix(arguments.matrix, overrides, arguments.models)
    else:
        variants = None if arguments.variants is None else arguments.variants.split(",")
        rates = dict(_rate(text) for text in arguments.lr)
        matrix = simple_matrix(arguments.preset, variants, arguments.seeds, rates, overrides)
    if arguments.baseline is not None:
        names = [row.name for row in matrix.rows]
        check(arguments.baseline in names, "--baseline", arguments.baseline, f"must be one of {names}")
        matrix = replace(matrix, baseline=arguments.baseline)
    if arguments.lr_sweep is not None:
        matrix = matrix.sweep(_number("--lr-sweep", text) for text in arguments.lr_sweep.split(","))
    return matrix


def _rate(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--lr {text!r}: must be VARIANT=RATE")
    return name, _number("--lr", value)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number") from None
