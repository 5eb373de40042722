"""`gva serve`: checks a checkpoint and the installed vLLM, then becomes `vllm serve`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a checkpoint with vLLM, over OpenAI's protocol")
    serve.add_argument("checkpoint", type=Path, help="a HuggingFace folder with its tokenizer, or a run")
    serve.add_argument("flags", nargs=argparse.REMAINDER, help="every flag of `vllm serve`, as it is")
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gva import cost
    from gva.run.folder import model_of
    from gva.serve.address import address
    from gva.serve.checks import check_checkpoint
    from gva.serve.flags import Flags
    from gva.serve.settings import found_gpu, settings
    from gva.serve.versions import installed, refusal

    flags = Flags.of(arguments.flags)
    checkpoint = model_of(arguments.checkpoint)
    config = check_checkpoint(checkpoint, weights=flags.value("load-format") != "dummy")
    why = refusal(installed())
    if why is not None:
        raise ValueError(why)
    place = address(flags)
    chosen = settings(config, cost.parameters(config)["total"], flags, found_gpu())
    for told in (place.told, *(setting.told for setting in chosen)):
        print(f"gva serve: {told}", flush=True)
    ours = [word for setting in chosen for word in (setting.flag, *setting.values)]
    words = ["serve", str(checkpoint), *place.flags, *ours, *arguments.flags]
    safely = {**os.environ, "PYTHONSAFEPATH": "1"}  # `python -m` would take modules from the folder that one stands in
    os.execve(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *words], safely)
