"""`gva import`: a trained checkpoint of another library."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("import", help="take in a trained Llama-like checkpoint, its logits unchanged")
    parser.add_argument("source", type=Path, help="a HuggingFace folder or a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, help="of the weights; by default as stored, float32 for GGUF")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from gva import cost
    from gva.convert.importer import import_checkpoint

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    config, has_tokenizer = import_checkpoint(arguments.source, arguments.out, dtype)
    parameters = cost.parameters(config)["total"]
    cached = cost.cache_scalars_per_token_per_layer(config)
    print(
        f"{arguments.out}: the same logits as its source; {parameters / 1e6:,.1f}M parameters in "
        f"{str(config.dtype).removeprefix('torch.')}, {config.num_attention_heads} heads in "
        f"{config.num_value_groups} groups, {cached} cached scalars per token and layer"
    )
    if not has_tokenizer:
        print(f"{arguments.source}: has no tokenizer, so none was taken over")
    print(f"a smaller cache: gva convert {arguments.out} --to gva --out ...")
    return 0
