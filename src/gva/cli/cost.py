"""`gva cost`: what each attention costs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gva.text import aligned

DTYPES = ("float32", "bfloat16", "float16")  # said here, or every command would load torch for its help


def add(commands: Any) -> None:
    def size(text: str) -> int:
        from gva.cost import parse_size

        try:
            return parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def numbers(text: str) -> list[int]:
        words = text.split(",")
        if not all(word.isdecimal() for word in words):
            raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of GPUs, as 1,2,4,8")
        return [int(word) for word in words]

    cost = commands.add_parser("cost", help="what each attention costs: cache, parameters, decode step, batch")
    cost.add_argument("checkpoint", nargs="?", help="config.json, or its folder, of a dense decoder of any family")
    cost.add_argument("--preset", help="a size of ours instead of a checkpoint")
    cost.add_argument("--variants", help="comma-separated; all of them by default")
    cost.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the config")
    cost.add_argument("--context", type=int, help="tokens per sequence, of which a sliding window keeps the last")
    cost.add_argument("--batch", type=int, default=1, help="sequences in the decode step that is counted")
    cost.add_argument("--memory", type=size, help="device memory, as 80GiB: adds the largest batch (needs --context)")
    cost.add_argument("--ranks", type=numbers, default=[], help="as 1,2,4,8: the cache of each tensor-parallel GPU")
    cost.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    cost.add_argument("--cache-dtype", choices=[*DTYPES, "fp8"], help="by default that of the weights")
    cost.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    cost.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva import cost
    from gva.config import PRESETS, VARIANTS
    from gva.errors import check, check_choice

    if (arguments.checkpoint is None) == (arguments.preset is None):
        raise ValueError(f"give either a checkpoint or --preset (one of {list(PRESETS)})")
    fine = arguments.memory is None or arguments.context is not None
    check(fine, "--memory", arguments.memory, "needs --context")
    overrides = dict(_field(text) for text in arguments.set)
    config, windows = _subject(arguments, overrides)
    variants = list(VARIANTS) if arguments.variants is None else arguments.variants.split(",")
    for variant in variants:
        check_choice("--variants", variant, VARIANTS)
    load = cost.Load(
        arguments.context, arguments.memory, arguments.batch, arguments.dtype, arguments.cache_dtype, windows,
        arguments.ranks,
    )  # fmt: skip
    before = None
    if overrides and arguments.preset is None:
        unchanged, windows = _subject(arguments, {})
        before = unchanged, replace(load, windows=windows)
    rows = cost.table(config, variants, load, before)
    _mark_refused(rows, lambda row: before[0] if before and row is rows[0] else config.with_variant(row["variant"]))
    print(json.dumps(rows, indent=2) if arguments.json else _format(rows))
    for note in _notes(config, load):
        print(f"note: {note}", file=sys.stderr)
    return 0


def _subject(arguments: argparse.Namespace, overrides: dict[str, Any]) -> tuple[Any, list[int | None] | None]:
    """The config that is counted, with some fields changed, and the windows of its layers."""
    from gva.config import VARIANT_FIELDS, GvaConfig, known_fields
    from gva.errors import check, nearest
    from gva.run.folder import model_of

    for name in overrides:
        check(name not in VARIANT_FIELDS, "--set", name, "is what a variant sets; choose among --variants instead")
    ours = {GvaConfig.attribute_map.get(name, name): value for name, value in overrides.items()}
    if arguments.preset is not None:
        return GvaConfig.preset(arguments.preset, variant="gqa", **ours), None
    source = _read_config(model_of(Path(arguments.checkpoint)))
    if source.get("model_type") == GvaConfig.model_type:
        for name in ours:
            check(name in known_fields(), "--set", name, f"GvaConfig has no such field{nearest(name, known_fields())}")
        return GvaConfig.from_dict(source, **ours), None
    from gva.cli import foreign

    return foreign.read(source, overrides)


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r}: must be FIELD=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give a config.json, or the folder or the run that holds one")
    try:
        source = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(source, dict):
        raise ValueError(f"{file}: must hold an object with the fields of a model config")
    return source


def _mark_refused(rows: list[dict[str, Any]], config_of: Callable[[dict[str, Any]], Any]) -> None:
    """Beside the cache of each rank: why `gva serve` would not split it so, or None."""
    from gva.serve.checks import check_ranks, check_servable

    for row in rows:
        for ranks, held in row.get("on_each_rank", {}).items():
            try:
                check_servable(config_of(row))
                check_ranks(config_of(row), int(ranks))
                held["refused"] = None
            except ValueError as error:
                held["refused"] = str(error)


def _notes(config: Any, load: Any) -> Iterator[str]:
    """What the figures do not say by themselves."""
    limit, windows = config.max_position_embeddings, load.windows or []
    if load.context is not None and load.context > limit:
        yield f"--context {load.context:,} is beyond the {limit:,} tokens of the model's max_position_embeddings"
    for window in sorted({window for window in windows if window is not None}):
        yield f"{windows.count(window)} of {len(windows)} layers keep the last {window:,} tokens alone, in every row"


def _format(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned table: what cannot be had says why."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "variant": lambda r: r["variant"],
        "G": lambda r: f"{r['num_value_groups']}",
        "scalars/token/layer": lambda r: f"{r['cache_scalars_per_token_per_layer']}",
        "bytes/token": lambda r: f"{r['cache_bytes_per_token']:,}",
        "saved vs GQA": lambda r: f"{r['cache_saved_against_gqa']:.1%}",
        "parameters": lambda r: f"{r['parameters'] / 1e6:,.1f}M",
    }
    good = [row for row in rows if "error" not in row]
    for ranks in good[0].get("on_each_rank", ()) if good else ():
        columns[f"each of {ranks}"] = partial(_on_each, ranks)
    if any("decode_bytes" in row for row in rows):
        columns["cache MB/sequence"] = lambda r: f"{r['cache_bytes'] / 1e6:,.1f}"
        columns["decode GFLOP"] = lambda r: f"{r['decode_flops'] / 1e9:,.2f}"
        columns["decode MB"] = lambda r: f"{r['decode_bytes'] / 1e6:,.1f}"
    if any("largest_batch" in row for row in rows):
        columns["largest batch"] = lambda r: f"{r['largest_batch']:,}"
    lines = aligned([list(columns), *[[read(row) for read in columns.values()] for row in good]])
    lines += [f"{row['variant']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, *_legend(good)])


def _on_each(ranks: str, row: dict[str, Any]) -> str:
    held = row["on_each_rank"][ranks]
    return f"{held['cache_scalars_per_token_per_layer']}{'*' if held['refused'] else ' '}"


def _legend(rows: list[dict[str, Any]]) -> list[str]:
    """Of the cache on each rank, and each reason for a refusal once."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for ranks, held in row.get("on_each_rank", {}).items():
            if held["refused"]:
                reasons.setdefault(held["refused"], {}).setdefault(row["variant"], []).append(ranks)
    lines = ["each of N: scalars per token and layer on each of N tensor-parallel GPUs; * gva serve refuses it"]
    for why, who in reasons.items():
        told = (f"{variant} on {'/'.join(ranks)}" for variant, ranks in who.items())
        lines.append(f"* {', '.join(told)}: {why}")
    return lines if any("on_each_rank" in row for row in rows) else []
