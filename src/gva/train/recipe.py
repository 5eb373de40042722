"""What a run is: the hyper-parameters that every variant shares, and how they are given."""

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
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


Rule = tuple[str, Callable[[Any], bool]]
POSITIVE: Rule = "must be positive", lambda value: 0 < value < math.inf
NOT_NEGATIVE: Rule = "must not be negative", lambda value: 0 <= value < math.inf
SHARE: Rule = "must lie between 0 and 1", lambda value: 0 <= value <= 1
BELOW_ONE: Rule = "must be at least 0 and below 1", lambda value: 0 <= value < 1
SEED: Rule = "must lie between 0 and 2^63 - 1", lambda value: value is None or 0 <= value < 2**63


def _field(default: Any, about: str, rule: Rule | list[str] | None = None) -> Any:
    """A field, what `gva train --help` says of it, and what must hold of its value, or a list of those allowed."""
    return field(default=default, metadata={"about": about, "rule": rule})


@dataclass(frozen=True)
class Recipe:
    """Sizes are in sequences and tokens, rates per step; the same for every variant."""

    steps: int = _field(1000, "optimizer steps", POSITIVE)
    length: int = _field(1024, "tokens per sequence", POSITIVE)
    global_batch: int = _field(64, "sequences per step, over all ranks", POSITIVE)
    micro_batch: int = _field(64, "sequences per forward pass and rank, at most; the rest is accumulated", POSITIVE)
    seed: int = _field(0, "of the initial weights, and of the data order unless data_seed says otherwise", SEED)
    data_seed: int | None = _field(None, "of the data order alone", SEED)
    lr: float = _field(1e-3, "learning rate after the warm-up", POSITIVE)
    map_lr: float = _field(1.0, "rate of GVA's maps M_h, in units of lr", POSITIVE)
    min_lr: float = _field(0.1, "where the cosine ends, in units of lr", SHARE)
    warmup: int = _field(100, "steps in which the rate rises; a tenth of steps where that is less", NOT_NEGATIVE)
    weight_decay: float = _field(0.1, "of matrices; gains do not decay", NOT_NEGATIVE)
    beta1: float = _field(0.9, "of AdamW", BELOW_ONE)
    beta2: float = _field(0.95, "of AdamW", BELOW_ONE)
    eps: float = _field(1e-8, "of AdamW", NOT_NEGATIVE)
    zclip: bool = _field(True, "clip gradients whose norm is an outlier")
    # With a teacher the loss is cross entropy + kl_weight kl_temperature^2 KL(teacher || model), in nats per token, the
    # logits of both divided by kl_temperature in the KL. Without one, these two say nothing.
    kl_weight: float = _field(1.0, "of the divergence from a teacher, beside the cross entropy", NOT_NEGATIVE)
    kl_temperature: float = _field(2.0, "that both models' logits are divided by in it", POSITIVE)
    document_mask: bool = _field(False, "no attention across packed documents")
    precision: str = _field("bf16", "bf16: autocast over float32 weights; fp32 throughout", ["bf16", "fp32"])
    compile: bool = _field(True, "through torch.compile")
    parallel: str = _field("ddp", "over several ranks: ddp repeats weights, fsdp shards them", ["ddp", "fsdp"])
    activation_checkpointing: bool = _field(False, "compute activations again on the way back, to save memory")
    log_every: int = _field(10, "steps between lines of metrics", POSITIVE)
    checkpoint_every: int = _field(500, "steps between checkpoints", POSITIVE)
    keep_checkpoints: int = _field(2, "how many of the newest stay", POSITIVE)
    eval_every: int = _field(250, "steps between validations; 0: after the last alone", NOT_NEGATIVE)
    eval_sequences: int = _field(64, "validation sequences", POSITIVE)
    diagnostics_every: int = _field(
        0, "steps between looks inside: induction, scales of queries and keys; 0: never", NOT_NEGATIVE
    )
    tasks_every: int = _field(0, "steps between scorings of tasks, and after the last step; 0: never", NOT_NEGATIVE)
    tasks: str = _field("paper", "which tasks: paper, or a comma-separated list")
    tasks_data: str = _field("", "the folder of their files")
    tasks_limit: int = _field(0, "items of each task; 0: all", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        for known in fields(self):
            rule, value = known.metadata["rule"], getattr(self, known.name)
            if isinstance(rule, list):
                check_choice(known.name, value, rule)
            elif rule is not None:
                told, holds = rule
                check(holds(value), known.name, value, told)
        placed = not self.tasks_every or bool(self.tasks_data)
        check(placed, "tasks_data", self.tasks_data, "tasks_every needs their folder")
        check(self.warmup <= self.steps, "warmup", self.warmup, f"must lie between 0 and steps={self.steps}")

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
# Of checkpoints that are trained further, beside the ones above. heal: 52M tokens after a conversion, looked at often.
FURTHER: dict[str, dict[str, Any]] = {
    "heal": {
        "steps": 800, "length": 1024, "global_batch": 64, "micro_batch": 16, "lr": 3e-4, "warmup": 40,
        "eval_every": 50, "checkpoint_every": 200,
    },
}  # fmt: skip


def explained() -> str:
    """Every field of the recipe, its default and what it is: a line each."""
    shown = {f.name: f"{f.name}={json.dumps(f.default)}" for f in fields(Recipe)}
    width = max(map(len, shown.values()))
    lines = [f"  {shown[f.name]:{width}}  {f.metadata['about']}" for f in fields(Recipe)]
    presets = [f"  {name}: " + " ".join(f"{k}={json.dumps(v)}" for k, v in RECIPES[name].items()) for name in RECIPES]
    rest = "Fields of the model: those of GvaConfig, docs/api.md."
    return "\n".join(["fields of the recipe, as key=value:", *lines, "", "presets change:", *presets, "", rest])


def build(
    preset: str, variant: str, overrides: dict[str, Any] | None = None, vocab_size: int | None = None
) -> tuple[GvaConfig, Recipe]:
    """The model and the recipe of a preset; each override goes to whichever of the two has such a field.

    The vocabulary follows the data where it is given, padded to a multiple of 64 for the matrix units.
    """
    check_choice("preset", preset, RECIPES)
    changes, model = _split(overrides or {})
    if vocab_size is not None:
        model.setdefault("vocab_size", -(-vocab_size // 64) * 64)
    config, recipe = GvaConfig.preset(preset, variant=variant, **model), _recipe(RECIPES[preset], changes)
    limit = config.max_position_embeddings
    check(recipe.length <= limit, "length", recipe.length, f"exceeds max_position_embeddings={limit}")
    return config, recipe


def further(preset: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """The recipe for a checkpoint that is trained further; its model stays what it is."""
    known = {**FURTHER, **RECIPES}
    check_choice("preset", preset, known)
    changes, model = _split(overrides or {})
    for name, value in model.items():
        check(False, name, value, "a field of the model, which is that of the checkpoint; give fields of the recipe")
    return _recipe(known[preset], changes)


def _split(overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the recipe and those of the model."""
    recipe_fields = {f.name for f in fields(Recipe)}
    model_fields = {f.name for f in fields(GvaConfig)}
    for name, value in overrides.items():
        if name not in recipe_fields | model_fields:
            known = [*(f.name for f in fields(Recipe)), *model_fields]
            raise ValueError(f"{name}={value!r}: neither a recipe nor a model field{nearest(name, known)}")
    changes = {name: _typed(name, value) for name, value in overrides.items() if name in recipe_fields}
    return changes, {name: value for name, value in overrides.items() if name not in recipe_fields}


def _recipe(preset: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """A preset with changes; a run cut short warms up for a tenth of it, unless that was asked for too."""
    merged = {**preset, **changes}
    if "steps" in changes and "warmup" not in changes:
        merged["warmup"] = min(preset.get("warmup", Recipe.warmup), changes["steps"] // 10)
    return replace(Recipe(), **merged)


def identity_of(
    config: GvaConfig, recipe: Recipe, train_set: Dataset, valid_set: Dataset, weights: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """What makes a run this run and no other: the model, the recipe, the data, and of trained weights that it begins
    `from` or that are its `teacher` their fingerprints."""
    model = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "architectures")}
    data = {"train": train_set.fingerprint, "valid": valid_set.fingerprint}
    identity = {"model": model, "recipe": recipe.identity(), "data": data, **({"weights": weights} if weights else {})}
    return json.loads(json.dumps(identity))


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
