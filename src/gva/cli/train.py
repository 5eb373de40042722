"""`gva train`: train a variant."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    about = "train a variant; run it again to go on after a stop or a kill"
    train = commands.add_parser("train", help=about, explain=_explain)
    train.add_argument("--preset", help="size and recipe: demo, small, paper-350m; with --from a recipe alone, or heal")
    train.add_argument("--variant", help="the attention; by default gva, the one that we recommend")
    train.add_argument("--from", dest="start", type=Path, help="train this further: a model folder, run or checkpoint")
    train.add_argument("--teacher", type=Path, help="learn from its predictions too: kl_weight=, kl_temperature=")
    train.add_argument(
        "--data", type=Path, help="a prepared folder, a text or a folder of texts; by default the standard library"
    )
    train.add_argument("--out", type=Path, required=True, help="folder for metrics, checkpoints and the model")
    train.add_argument("--seed", type=int, help="of the initial weights and the data order")
    train.add_argument("--data-seed", type=int, help="of the data order alone")
    train.add_argument("--steps", type=int)
    train.add_argument("--config", type=Path, help="a TOML or JSON file of further fields")
    train.add_argument("--device", choices=["cpu", "cuda"])
    train.add_argument("overrides", nargs="*", metavar="key=value", help="any field of the recipe or the model")
    train.set_defaults(run=run)


def _explain() -> str:
    from gva.train.recipe import explained

    return explained()


def run(arguments: argparse.Namespace) -> int:
    from gva.data.own import settle_data
    from gva.data.source import open_data
    from gva.run.folder import MODEL, refuse_foreign
    from gva.run.metrics import METRICS
    from gva.train.loop import Stopped, train
    from gva.train.recipe import read_overrides
    from gva.train.trained import open_given

    overrides = read_overrides(arguments.config, arguments.overrides)
    named = {"seed": arguments.seed, "data_seed": arguments.data_seed, "steps": arguments.steps}
    overrides |= {name: value for name, value in named.items() if value is not None}
    given = open_given(arguments.start, arguments.teacher)
    _settings(arguments, given, overrides)  # a misspelt field is told before any data is prepared
    refuse_foreign(arguments.out)
    tokenizer = given.start.tokenizer if given.start else None
    data = settle_data(arguments.data, arguments.out, tokenizer=tokenizer)
    config, recipe = _settings(arguments, given, overrides, open_data(data).vocab_size)
    try:
        train(config, recipe, data, arguments.out, given=given, device=arguments.device)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 130
    print(f"{arguments.out / MODEL}: trained; metrics in {arguments.out / METRICS}")
    return 0


def _settings(
    arguments: argparse.Namespace, given: Any, overrides: dict[str, Any], vocabulary: int | None = None
) -> Any:
    """The model and the recipe: of a preset, or the model of a checkpoint and the recipe of a preset."""
    from gva.errors import check
    from gva.train.recipe import build, further

    if given.start is None:
        check(arguments.preset is not None, "--preset", None, "give a size and recipe, or --from a checkpoint")
        return build(arguments.preset, arguments.variant or "gva", overrides, vocabulary)
    check(arguments.variant is None, "--variant", arguments.variant, "the attention is that of --from; leave it out")
    check(
        arguments.data is not None,
        "--data",
        None,
        "--from needs text, or data of its tokenizer: gva data prepare --tokenizer",
    )
    return given.start.config, further(arguments.preset or "heal", overrides)
