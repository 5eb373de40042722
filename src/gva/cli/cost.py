"""`gva cost`: what each attention costs."""

import argparse
import json
from pathlib import Path
from typing import Any

from gva.text import aligned


def add(commands: Any) -> None:
    from gva.cost import DTYPE_BYTES, parse_size

    def size(text: str) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    cost = commands.add_parser("cost", help="what each attention costs: cache, parameters, decode step, batch")
    cost.add_argument("checkpoint", nargs="?", help="config.json or folder of a Llama-like or gva checkpoint")
    cost.add_argument("--preset", help="a size of ours instead of a checkpoint")
    cost.add_argument("--variants", help="comma-separated; all of them by default")
    cost.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the preset")
    cost.add_argument("--context", type=int, help="cached tokens per sequence")
    cost.add_argument("--batch", type=int, default=1, help="sequences in the decode step that is counted")
    cost.add_argument("--memory", type=size, help="device memory, as 80GiB: adds the largest batch (needs --context)")
    cost.add_argument("--dtype", default="bfloat16", choices=[d for d in DTYPE_BYTES if d != "fp8"])
    cost.add_argument("--cache-dtype", choices=list(DTYPE_BYTES), help="by default that of the weights")
    cost.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    cost.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva import cost
    from gva.config import PRESETS, VARIANT_FIELDS, VARIANTS, GvaConfig
    from gva.errors import check, check_choice

    if (arguments.checkpoint is None) == (arguments.preset is None):
        raise ValueError(f"give either a checkpoint or --preset (one of {list(PRESETS)})")
    fine = arguments.memory is None or arguments.context is not None
    check(fine, "--memory", arguments.memory, "needs --context")
    overrides = dict(_field(text) for text in arguments.set)
    for name in overrides:
        check(name not in VARIANT_FIELDS, "--set", name, "is what a variant sets; choose among --variants instead")
    if arguments.preset is not None:
        config = GvaConfig.preset(arguments.preset, variant="gqa", **overrides)
    else:
        check(not overrides, "--set", arguments.set, "changes a preset, not a checkpoint")
        config = GvaConfig.from_llama_like(_read_config(Path(arguments.checkpoint)))
    variants = list(VARIANTS) if arguments.variants is None else arguments.variants.split(",")
    for variant in variants:
        check_choice("--variants", variant, VARIANTS)
    load = (arguments.context, arguments.memory, arguments.batch)
    rows = cost.table(config, variants, *load, arguments.dtype, arguments.cache_dtype)
    print(json.dumps(rows, indent=2) if arguments.json else _format(rows))
    return 0


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
        raise FileNotFoundError(f"{file}: no such file; give a config.json or the folder that holds one")
    try:
        source = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(source, dict):
        raise ValueError(f"{file}: must hold an object with the fields of a model config")
    return source


def _format(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned table: what cannot be had says why."""
    columns = {
        "variant": lambda r: r["variant"],
        "G": lambda r: f"{r['num_value_groups']}",
        "scalars/token/layer": lambda r: f"{r['cache_scalars_per_token_per_layer']}",
        "bytes/token": lambda r: f"{r['cache_bytes_per_token']:,}",
        "saved vs GQA": lambda r: f"{r['cache_saved_against_gqa']:.1%}",
        "parameters": lambda r: f"{r['parameters'] / 1e6:,.1f}M",
    }
    if any("decode_bytes" in row for row in rows):
        columns["decode GFLOP"] = lambda r: f"{r['decode_flops'] / 1e9:,.2f}"
        columns["decode MB"] = lambda r: f"{r['decode_bytes'] / 1e6:,.1f}"
    if any("largest_batch" in row for row in rows):
        columns["largest batch"] = lambda r: f"{r['largest_batch']:,}"
    good = [row for row in rows if "error" not in row]
    lines = aligned([list(columns), *[[read(row) for read in columns.values()] for row in good]])
    return "\n".join([*lines, *[f"{row['variant']}: {row['error']}" for row in rows if "error" in row]])
