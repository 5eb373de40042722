"""The command `gva`: parses, calls, prints."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gva.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that names the nearest option or choice when one is misspelt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is none of {allowed}{nearest(str(value), action.choices)}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if hasattr(parsed, "overrides"):  # key=value words may stand between options, which argparse does not expect
            parsed.overrides += [word for word in unknown if "=" in word and not word.startswith("-")]
            unknown = [word for word in unknown if word not in parsed.overrides]
        if unknown:
            options = self._options(parsed)
            told = ", ".join(f"{name}{nearest(name.split('=')[0], options)}" for name in unknown)
            self.error(f"unknown argument {told}")
        return parsed

    def _options(self, parsed: Any) -> list[str]:
        """The options of the command that was given."""
        parser: argparse.ArgumentParser = self
        for chosen in (parsed.command, getattr(parsed, "action", None)):
            nested = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
            if nested is not None and chosen in nested.choices:
                parser = nested.choices[chosen]
        return [option for action in parser._actions for option in action.option_strings]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="gva", description="Grouped Value Attention: a KV cache of values and one small key.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_cost(commands)
    _add_data(commands)
    _add_train(commands)
    _add_generate(commands)
    bench = commands.add_parser("bench", help="run a benchmark of the source tree; what follows its name goes to it")
    bench.add_argument("name", choices=["decode", "end_to_end", "train"])
    bench.add_argument("arguments", nargs=argparse.REMAINDER)
    bench.set_defaults(run=_bench)
    demo = commands.add_parser("demo", help="build every variant at a toy size, check it, measure its cache")
    demo.set_defaults(run=_demo)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has gone: not our error
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        print(f"gva {arguments.command}: {error}", file=sys.stderr)
        return 2


def _add_cost(commands: Any) -> None:
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
    cost.set_defaults(run=_cost)


def _cost(arguments: argparse.Namespace) -> int:
    from gva import cost
    from gva.config import PRESETS, VARIANT_FIELDS, VARIANTS, GvaConfig
    from gva.errors import check, check_choice

    if (arguments.checkpoint is None) == (arguments.preset is None):
        raise ValueError(f"give either a checkpoint or --preset (one of {list(PRESETS)})")
    check(
        arguments.memory is None or arguments.context is not None,
        "--memory",
        arguments.memory,
        "needs --context",
    )
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
    rows = cost.table(
        config,
        variants,
        arguments.context,
        arguments.memory,
        arguments.batch,
        arguments.dtype,
        arguments.cache_dtype,
    )
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
    cells = [list(columns), *[[read(row) for read in columns.values()] for row in good]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([*lines, *[f"{row['variant']}: {row['error']}" for row in rows if "error" in row]])


def _add_data(commands: Any) -> None:
    data = commands.add_parser("data", help="text to token shards")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="tokenize files or a dataset; without either, the standard library")
    prepare.add_argument("inputs", nargs="*", type=Path, help="jsonl, txt or parquet files, plain or .gz .xz .zst")
    prepare.add_argument("--out", type=Path, required=True, help="folder for the shards")
    prepare.add_argument("--dataset", help="a HuggingFace dataset, streamed: HuggingFaceFW/fineweb-edu, or a folder")
    prepare.add_argument("--dataset-config", help="its configuration, such as sample-100BT")
    prepare.add_argument("--dataset-split", default="train")
    prepare.add_argument("--max-documents", type=int, help="stop the stream after so many")
    prepare.add_argument("--valid", nargs="+", type=Path, help="validation files; else one document in 100")
    prepare.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; else a BPE trained on the data")
    prepare.add_argument("--vocab-size", type=int, help="of a BPE trained here (16384; 2048 for the standard library)")
    prepare.add_argument("--end", help="the token that ends a document")
    prepare.add_argument("--field", default="text", help="where the text is, in jsonl and parquet")
    prepare.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    prepare.set_defaults(run=_data_prepare)
    verify = actions.add_parser("verify", help="compare every shard with its checksum")
    verify.add_argument("folder", type=Path)
    verify.set_defaults(run=_data_verify)


def _data_prepare(arguments: argparse.Namespace) -> int:
    from gva.data import prepare

    size = arguments.vocab_size or 16384
    shared = {"tokenizer": arguments.tokenizer, "vocab_size": size, "end": arguments.end, "field": arguments.field}
    if arguments.dataset and arguments.inputs:
        raise ValueError(f"give files or --dataset, not both ({arguments.inputs[0]} and {arguments.dataset})")
    if arguments.valid and not arguments.inputs:
        raise ValueError("--valid goes with input files; elsewhere documents are held out")
    if arguments.tokenizer and not arguments.inputs and not arguments.dataset:
        raise ValueError("--tokenizer: the standard library is tokenised with a BPE of its own; give input files")
    if arguments.dataset:
        index = prepare.prepare_dataset(
            arguments.dataset,
            arguments.out,
            config=arguments.dataset_config,
            split=arguments.dataset_split,
            max_documents=arguments.max_documents,
            **shared,
        )
    elif arguments.inputs:
        index = prepare.prepare_files(
            arguments.inputs, arguments.out, valid=arguments.valid, workers=arguments.workers, **shared
        )
    else:
        index = prepare.prepare_standard_library(arguments.out, arguments.vocab_size or 2048)
    counts = ", ".join(f"{tokens:,} {split} tokens" for split, tokens in index["tokens"].items())
    print(f"{arguments.out}: {counts}, vocabulary {index['vocab_size']:,}")
    return 0


def _data_verify(arguments: argparse.Namespace) -> int:
    from gva.data.shards import TokenDataset

    for split in ("train", "valid"):
        TokenDataset(arguments.folder, split).verify()
    print(f"{arguments.folder}: every shard is as it was written")
    return 0


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train a variant; run it again to go on after a stop or a kill")
    train.add_argument("--preset", required=True, help="size and recipe: demo, small, paper-350m")
    train.add_argument("--variant", default="gva-drope-16", help="the attention")
    train.add_argument("--data", type=Path, help="a prepared folder; by default the standard library, prepared in OUT")
    train.add_argument("--out", type=Path, required=True, help="folder for metrics, checkpoints and the model")
    train.add_argument("--seed", type=int, help="of the initial weights and the data order")
    train.add_argument("--data-seed", type=int, help="of the data order alone")
    train.add_argument("--steps", type=int)
    train.add_argument("--config", type=Path, help="a TOML or JSON file of further fields")
    train.add_argument("--device", choices=["cpu", "cuda"])
    train.add_argument("overrides", nargs="*", metavar="key=value", help="any field of the recipe or the model")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from gva.data.prepare import prepare_standard_library
    from gva.data.shards import INDEX, TokenDataset
    from gva.train.loop import Stopped, train
    from gva.train.recipe import build, read_overrides

    overrides = read_overrides(arguments.config, arguments.overrides)
    named = {"seed": arguments.seed, "data_seed": arguments.data_seed, "steps": arguments.steps}
    overrides |= {name: value for name, value in named.items() if value is not None}
    build(arguments.preset, arguments.variant, overrides)  # a misspelt field is told before any data is prepared
    data = arguments.data or arguments.out / "data"
    if arguments.data is None and not (data / INDEX).is_file():
        if int(os.environ.get("RANK", "0")) == 0:
            prepare_standard_library(data)
        while not (data / INDEX).is_file():  # the other ranks, under torchrun
            time.sleep(0.2)
    config, recipe = build(arguments.preset, arguments.variant, overrides, TokenDataset(data).vocab_size)
    try:
        train(config, recipe, data, arguments.out, device=arguments.device)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 130
    print(f"{arguments.out / 'model'}: trained; metrics in {arguments.out / 'metrics.jsonl'}")
    return 0


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue prompts with a trained model, on the paged cache")
    generate.add_argument("checkpoint", type=Path, help="a HuggingFace folder with its tokenizer, such as RUN/model")
    generate.add_argument("--prompt", action="append", help="may be given several times; else lines of standard input")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--batch", type=int, default=8, help="sequences at a time")
    generate.add_argument("--device", choices=["cpu", "cuda"])
    generate.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    generate.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from gva.data.tokenizer import load_tokenizer
    from gva.generate import PagedGenerator
    from gva.model import GvaForCausalLM

    tokenizer = load_tokenizer(arguments.checkpoint)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else "auto"
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = GvaForCausalLM.from_pretrained(arguments.checkpoint, dtype=dtype).to(device).eval()
    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    # An empty prompt begins a document, as the end of the one before did in training.
    prompts = [tokenizer.tokenizer.encode(text, add_special_tokens=False).ids or [tokenizer.end] for text in texts]
    torch.manual_seed(arguments.seed)
    longest = max(map(len, prompts), default=1) + arguments.max_new_tokens
    batch = min(arguments.batch, max(1, len(prompts)))
    generator = PagedGenerator(model, batch, longest, temperature=arguments.temperature)
    for text, tokens in zip(texts, generator.generate(prompts, arguments.max_new_tokens, tokenizer.end), strict=True):
        print(text + tokenizer.tokenizer.decode(tokens), flush=True)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    script = Path(__file__).parents[2] / "benchmarks" / f"{arguments.name}.py"
    if not script.is_file():
        raise FileNotFoundError(f"{script}: benchmarks come with the source tree, not with the package; clone it")
    return subprocess.run([sys.executable, str(script), *arguments.arguments]).returncode


def _demo(arguments: argparse.Namespace) -> int:
    from gva.demo import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
