"""What a run is: the hyper-parameters that every variant shares, and how they are given."""

import json
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gva.config import GvaConfig, own_fields
from gva.data.source import Dataset
from gva.errors import check, check_choice, nearest

# What may differ between the two halves of an interrupted run, because it changes no loss (beyond rounding).
FREE = (
    "micro_batch", "compile", "parallel", "activation_checkpointing", "log_every",
    "checkpoint_every", "keep_checkpoints", "eval_every", "eval_sequences", "diagnostics_every",
    "tasks_every", "tasks", "tasks_data", "tasks_limit",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Sizes are in sequences and tokens, rates per step; the same for every variant."""

    steps: int = 1000
    length: int = 1024  # tokens per sequence
    global_batch: int = 64  # sequences per step, over all ranks
    micro_batch: int = 64  # sequences per forward pass and rank, at most; the rest is accumulated
    seed: int = 0  # initial weights, and the data order unless data_seed says otherwise
    data_seed: int | None = None
    lr: float = 1e-3
    map_lr: float = 1.0  # rate of GVA's maps M_h, in units of lr
    min_lr: float = 0.1  # of lr, where the cosine ends
    warmup: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    zclip: bool = True
    document_mask: bool = False  # no attention across packed documents
    precision: str = "bf16"  # bf16: autocast over float32 weights; fp32: float32 throughout
    compile: bool = True
    parallel: str = "ddp"  # over several ranks: ddp | fsdp
    activation_checkpointing: bool = False
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_every: int = 250
    eval_sequences: int = 64
    diagnostics_every: int = 0  # 0: never
    tasks_every: int = 0  # 0: never; else also after the last step
    tasks: str = "paper"  # or a comma-separated list of them
    tasks_data: str = ""  # the folder of their files
    tasks_limit: int = 0  # items of each task; 0: all

    def __post_init__(self) -> None:
        sizes = ("steps", "length", "global_batch", "micro_batch", "eval_sequences", "keep_checkpoints")
        for name in (*sizes, "log_every", "checkpoint_every"):
            check(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        check(self.map_lr > 0, "map_lr", self.map_lr, "must be positive")
        check_choice("precision", self.precision, ("bf16", "fp32"))
        check_choice("parallel", self.parallel, ("ddp", "fsdp"))
        for name in ("tasks_every", "tasks_limit"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        placed = not self.tasks_every or bool(self.tasks_data)
        check(placed, "tasks_data", self.tasks_data, "tasks_every needs their folder")
        check(0 <= self.warmup <= self.steps, "warmup", self.warmup, f"must lie between 0 and steps={self.steps}")

    @property
    def order_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.length

    def identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


# demo: minutes on two cores. small: 79M tokens, a minute on one H200. paper-350m: the paper's 30B tokens; batch,
# rate and schedule are our choices, since the paper states none.
RECIPES: dict[str, dict[str, Any]] = {
    "demo": {
        "steps": 120, "length": 128, "global_batch": 16, "micro_batch": 16, "lr": 3e-3, "warmup": 20,
        "precision": "fp32", "compile": False, "eval_every": 40, "eval_sequences": 32, "checkpoint_every": 60,
    },
    "small": {"steps": 1200, "length": 1024, "global_batch": 64, "micro_batch": 64, "lr": 1e-3, "warmup": 100},
    "paper-350m": {
        "steps": 28610, "length": 2048, "global_batch": 512, "micro_batch": 16, "lr": 6e-4, "warmup": 1000,
        "checkpoint_every": 1000, "eval_every": 500, "eval_sequences": 256,
    },
}  # fmt: skip


def build(
    preset: str, variant: str, overrides: dict[str, Any] | None = None, vocab_size: int | None = None
) -> tuple[GvaConfig, Recipe]:
    """The model and the recipe of a preset; each override goes to whichever of the two has such a field.

    The vocabulary follows the data where it is given, padded to a multiple of 64 for the matrix units.
    """
    check_choice("preset", preset, RECIPES)
    recipe_fields = {f.name: f.type for f in fields(Recipe)}
    model_fields = {f.name for f in fields(GvaConfig)}
    changes: dict[str, Any] = dict(RECIPES[preset])
    model: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        if name in recipe_fields:
            changes[name] = _typed(name, value)
        elif name in model_fields:
            model[name] = value
        else:
            known = [*recipe_fields, *model_fields]
            raise ValueError(f"{name}={value!r}: neither a recipe nor a model field{nearest(name, known)}")
    if vocab_size is not None:
        model.setdefault("vocab_size", -(-vocab_size // 64) * 64)
    if "steps" in (overrides or {}) and "warmup" not in (overrides or {}):
        changes["warmup"] = min(changes.get("warmup", Recipe.warmup), changes["steps"] // 10)
    return GvaConfig.preset(preset, variant=variant, **model), replace(Recipe(), **changes)


def identity_of(config: GvaConfig, recipe: Recipe, train_set: Dataset, valid_set: Dataset) -> dict[str, dict[str, Any]]:
    """What makes a run this run and no other: the model, the recipe and the data."""
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    data = {"train": train_set.fingerprint, "valid": valid_set.fingerprint}
    return json.loads(json.dumps({"model": model, "recipe": recipe.identity(), "data": data}))


def identity_defaults() -> dict[str, dict[str, Any]]:
    """What an identity means by a field that it does not have, since it was written before there was one."""
    model = {f.name: f.default for f in fields(GvaConfig) if f.name in own_fields()}
    return {"model": model, "recipe": Recipe().identity(), "data": {}}


def _typed(name: str, value: Any) -> Any:
    """An int given for a float field is fine; any other mismatch is named."""
    if name == "data_seed" and value is None:
        return None
    default = getattr(Recipe(), name)
    wanted = int if name == "data_seed" else type(default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    check(type(value) is wanted, name, value, f"must be of type {wanted.__name__}")
    return value


def read_overrides(file: Path | None, pairs: list[str]) -> dict[str, Any]:
    """Overrides from a TOML or JSON file, then from key=value words, which win."""
    overrides = {} if file is None else read_fields(file)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r}: must be key=value")
        try:
            overrides[name] = json.loads(value)
        except ValueError:
            overrides[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return overrides


def read_fields(file: Path) -> dict[str, Any]:
    """What a TOML or JSON file says."""
    try:
        text = file.read_text()
        return json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: not readable ({error})") from error
