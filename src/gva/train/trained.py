"""Trained weights that a run begins from, or whose model is its teacher."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gva.config import GvaConfig, own_fields
from gva.data.publish import files_of
from gva.data.same import cutting
from gva.data.source import Dataset
from gva.data.tokenizer import FILE
from gva.errors import check
from gva.evaluate.loading import Place, find, load_model, tokenizer_places
from gva.model import GvaForCausalLM, load_whole
from gva.run.files import read_object
from gva.run.folder import read_run
from gva.train.recipe import Recipe
from gva.weights import WEIGHTS, fingerprint, shards_of, verify_folder


@dataclass(frozen=True)
class Trained:
    """Weights and the config that they are of; nothing of them is in memory."""

    path: Path  # as it was given
    place: Place
    config: GvaConfig

    @property
    def name(self) -> str:
        """Of the run, or of the folder."""
        return (self.place.run or self.place.weights).name

    @property
    def is_folder(self) -> bool:
        """Whether it is a HuggingFace folder, not a training checkpoint."""
        return (self.place.weights / "config.json").is_file()

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer that the model was trained with, where it is known."""
        return next((folder for folder in tokenizer_places(self.place) if (folder / FILE).is_file()), None)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any weight and any field of the config."""
        config = {name: getattr(self.config, name) for name in own_fields()}
        return fingerprint(json.dumps(config, sort_keys=True).encode(), self._files())

    def load(self, dtype: torch.dtype) -> GvaForCausalLM:
        """The model in `dtype`; refused where its folder does not have all of its weights."""
        if not self.is_folder:
            return load_model(self.place, dtype, "cpu")
        config = GvaConfig.from_dict(self.config.to_dict())  # loading writes into it
        return load_whole(self.place.weights, config, dtype=dtype)

    def check_fits(self, recipe: Recipe, data: Dataset) -> None:
        """Refuse sequences that are too long for it, and data of another tokenizer."""
        files_of(self.place.weights)  # a link among them is told now, not when they are copied
        size, limit = self.config.vocab_size, self.config.max_position_embeddings
        check(
            recipe.length <= limit, "length", recipe.length, f"exceeds max_position_embeddings={limit} of {self.path}"
        )
        known, theirs = self.place.tokenizer, cutting(data.folder / "tokenizer")
        if data.vocab_size > size or known not in (None, theirs):
            remedy = f"gva data prepare TEXT --tokenizer {(self.tokenizer or self.path) / FILE} --out FOLDER"
            raise ValueError(
                f"{data.folder}: tokens of another tokenizer than that of {self.path}; make it with: {remedy}"
            )

    def _files(self) -> list[Path]:
        folder = self.place.weights
        if not self.is_folder:
            return sorted(folder.glob("*.distcp"))
        verify_folder(folder)
        files = [folder / name for name in shards_of(folder) or [WEIGHTS]]
        if not files[0].is_file():
            raise FileNotFoundError(f"{files[0]}: missing; give a folder with weights as safetensors")
        return files


def open_trained(path: Path) -> Trained:
    """What lies at `path`: a model folder, a run or a training checkpoint of ours; another library's is refused."""
    place = find(path)
    if (place.weights / "config.json").is_file():
        stored = read_object(place.weights / "config.json", "copy it again")
    else:
        assert place.run is not None
        stored = read_run(place.run)["identity"]["model"]
    try:
        config = GvaConfig.from_dict(stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # What its folder says besides, where it lies among that, is none of a new model.
    return Trained(path, place, GvaConfig(**{name: getattr(config, name) for name in own_fields()}))


@dataclass(frozen=True)
class Given:
    """The trained weights that a run is given."""

    start: Trained | None = None  # to begin from, instead of random ones
    teacher: Trained | None = None  # a frozen model whose predictions are part of the loss, as the recipe says

    @property
    def fingerprints(self) -> dict[str, str]:
        named = {"from": self.start, "teacher": self.teacher}
        return {name: trained.fingerprint for name, trained in named.items() if trained is not None}

    def check_fits(self, config: GvaConfig, recipe: Recipe, data: Dataset) -> None:
        """Refuse what a model of this config cannot begin from or learn from on this data."""
        for trained in (self.start, self.teacher):
            if trained is not None:
                trained.check_fits(recipe, data)
        if self.teacher is not None:
            theirs, ours, path = self.teacher.config.vocab_size, config.vocab_size, str(self.teacher.path)
            check(
                theirs == ours, "teacher", path, f"has a vocabulary of {theirs}, the model one of {ours}: not the same"
            )


NOTHING = Given()


def open_given(start: Path | None, teacher: Path | None) -> Given:
    return Given(*(None if path is None else open_trained(path) for path in (start, teacher)))
