"""A model and its tokenizer, from whatever a person names.

A HuggingFace folder (a run's model/), a run's folder (its model, or while there is none its newest checkpoint), or one
of a run's training checkpoints.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gva.data.same import check_own, check_same, cutting
from gva.data.source import open_data
from gva.data.tokenizer import FILE, load_tokenizer
from gva.errors import check
from gva.model import GvaConfig, GvaForCausalLM, load_whole, shapes_for
from gva.run.checkpoints import path_of, read_checkpoint, shapes_in, step_of, steps_in
from gva.run.folder import CHECKPOINTS, MODEL, RUN, read_run
from gva.run.metrics import read_metrics
from gva.run.storage import LIST
from gva.weights import AS_DATA, CODELESS, misfits, told, verify_folder


@dataclass(frozen=True)
class Place:
    """Where the weights lie, and of which run and step they are, if any."""

    weights: Path
    run: Path | None = None
    step: int | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the run, empty without one."""
        return {} if self.run is None else read_run(self.run)["recipe"]

    @property
    def tokenizer(self) -> str | None:
        """The fingerprint of the tokenizer that the model was trained with: as its run says, else of the one beside
        its weights."""
        told = {} if self.run is None else read_run(self.run)
        beside = self.weights / FILE
        return told.get("tokenizer") or (cutting(beside) if beside.is_file() else None)

    @property
    def tokens(self) -> int | None:
        """Tokens trained on."""
        recipe = self.recipe
        return self.step * recipe["global_batch"] * recipe["length"] if recipe and self.step is not None else None


def find(path: Path) -> Place:
    """Where `path` points: at a model folder, a run, or a training checkpoint of one."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    path = path.resolve()
    if (path / RUN).is_file():
        return _of_run(path)
    if (path / "config.json").is_file():
        of_run = path.name == MODEL and (path.parent / RUN).is_file()
        return _of_run(path.parent) if of_run else Place(path)
    if (path / LIST).is_file():
        run = path.parent.parent
        if not (run / RUN).is_file():
            raise FileNotFoundError(
                f"{run / RUN}: missing, and without it the model of a training checkpoint is unknown; give the "
                "checkpoint where its run wrote it, RUN/checkpoints/step-..."
            )
        return Place(path, run, step_of(path))
    raise FileNotFoundError(
        f"{path}: not a checkpoint; give a model folder (with config.json), a run (with {RUN}) or one of its "
        "checkpoints/step-..."
    )


def _of_run(run: Path) -> Place:
    if (run / MODEL / "config.json").is_file():
        done = read_metrics(run, "done")
        return Place(run / MODEL, run, done[-1]["step"] if done else None)
    steps = steps_in(run / CHECKPOINTS)
    if not steps:
        raise FileNotFoundError(f"{run}: a run without a model or a checkpoint yet; train it further")
    return Place(path_of(run / CHECKPOINTS, steps[-1]), run, steps[-1])


def config_of(place: Place) -> Any:
    """The config of the model, before any of its weights are read."""
    from transformers import AutoConfig  # gva.model has registered ours with it

    if (place.weights / "config.json").is_file():
        verify_folder(place.weights)
        with told(place.weights):
            return AutoConfig.from_pretrained(place.weights, **CODELESS)
    assert place.run is not None
    return GvaConfig.from_dict(read_run(place.run)["identity"]["model"])


def load_model(place: Place, dtype: torch.dtype | None = None, device: str | None = None) -> Any:
    """The model, ready to score, in `dtype` or as it was saved, on `device` or a GPU if there is one."""
    config = config_of(place)
    if not (place.weights / "config.json").is_file():
        model = _from_training(place, config)
    elif isinstance(config, GvaConfig):
        with told(place.weights):
            model = load_whole(place.weights, config, dtype=dtype or "auto")
    else:
        model = _foreign(place.weights, config, dtype)
    model = model.to(device=device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype=dtype)
    model.set_attn_implementation("sdpa")  # what takes a mask of truth values, as packs have
    return model.eval()


def _foreign(folder: Path, config: Any, dtype: torch.dtype | None) -> Any:
    """Another family's model, with all of its weights."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = AS_DATA["attn_implementation"]  # what the config says itself would go first
    with told(folder):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype or "auto", output_loading_info=True, **AS_DATA
        )
    if missing := sorted(found["missing_keys"]):
        raise OSError(f"{folder}: has no {', '.join(missing[:3])}, {len(missing)} in all; copy the checkpoint again")
    return model


def _from_training(place: Place, config: GvaConfig) -> GvaForCausalLM:
    """The weights alone out of a training checkpoint."""
    assert place.run is not None
    identity = read_run(place.run)["identity"]
    remedy = "give another of its run"
    held = {name: shape for name, shape in shapes_in(place.weights, remedy).items() if name.startswith("model.")}
    if wrong := misfits({f"model.{name}": shape for name, shape in shapes_for(config).items()}, held):
        raise OSError(f"{place.weights}: its weights are not those of {place.run / RUN}: {wrong}; copy the run again")
    model = GvaForCausalLM(config)
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    read_checkpoint(place.weights, weights, identity, remedy)
    return model


def load_tokenizer_of(place: Place, vocab_size: int, given: Path | None = None, data: Path | None = None) -> Any:
    """The tokenizer: the one given, else the model's own, else that of the data the run was trained on."""
    folders = [given] if given is not None else tokenizer_places(place, data)
    found = next((f for f in folders if (f / FILE if f.is_dir() else f).is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{place.weights}: no tokenizer ({FILE} in none of {', '.join(map(str, folders))}); say with --tokenizer "
            "which the model was trained with"
        )
    tokenizer = open_tokenizer(found)
    remedy = "say with --tokenizer which the model was trained with"
    check_same(found, place.tokenizer, place.run or place.weights, remedy)
    why = f"has {len(tokenizer)} tokens, the model {vocab_size}: it is not the one that the model was trained with"
    check(len(tokenizer) <= vocab_size, "tokenizer", str(found), why)
    return tokenizer


def check_data(place: Place, data: Path) -> None:
    """Refuse a prepared folder whose tokens are not those that the model was trained on."""
    check_own(open_data(data))
    remedy = "prepare the text with the model's tokenizer, by --tokenizer"
    check_same(data / "tokenizer", place.tokenizer, place.run or place.weights, remedy)


def tokenizer_places(place: Place, data: Path | None = None) -> list[Path]:
    """The folders that may have it, the likeliest first."""
    run = [] if place.run is None else [place.run / MODEL, place.run / "data" / "tokenizer"]
    return [place.weights, *run[:1], *([] if data is None else [data / "tokenizer"]), *run[1:]]


def open_tokenizer(path: Path) -> Any:
    """A tokenizer of transformers, from its folder or a tokenizer.json alone."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        with told(path):
            return AutoTokenizer.from_pretrained(path, **CODELESS)
    plain = load_tokenizer(path)
    file = path / FILE if path.is_dir() else path
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=plain.tokenizer.id_to_token(plain.end))
