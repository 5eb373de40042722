"""The card of a trained model: what it is, what it was trained on and how, how good it is, how to load and serve it.

Nothing in it depends on the day or the clock, so that the same training leaves the same card.
"""

from pathlib import Path
from typing import Any

from gva import cost
from gva.config import GvaConfig
from gva.data.publish import section
from gva.data.source import Dataset, described
from gva.evaluate.results import table
from gva.remote import DISTRIBUTION, FILE
from gva.run.folder import read_run
from gva.run.metrics import read_metrics
from gva.train.recipe import Recipe
from gva.train.trained import Given

SCORES = "scores"  # the section that a later evaluation writes anew
KINDS = ("eval", "tasks")  # the lines of a run's metrics that it is made of

CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: unknown
tags:
- grouped-value-attention
- gva
---

# {title}

{about}

**Licence: not chosen yet.** Say above which one you give it; that of the data counts too.

## Load

```bash
pip install {distribution}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))
```

`trust_remote_code` runs `{file}`, which imports that package and does nothing else.

## Serve

{serve}

## Data

{data}

## Recipe

{recipe}

## Scores

{scores}
"""


def card(run: Path, config: GvaConfig, recipe: Recipe, trained_on: Dataset, given: Given) -> str:
    """The card of a run that has been trained to its end."""
    millions = f"{cost.parameters(config)['total'] / 1e6:.1f}M"
    return CARD.format(
        title=f"A language model with {config.attention.upper()} attention, {millions} parameters",
        about=_about(config, millions, given),
        distribution=DISTRIBUTION,
        file=FILE,
        serve=_serve(config),
        data=f"{described(trained_on)}.",
        recipe=_recipe(run, recipe, given),
        scores=section(SCORES, scores(run)),
    )


def _about(config: GvaConfig, millions: str, given: Given) -> str:
    held, usual = (cost.cache_scalars_per_token_per_layer(c) for c in (config, config.with_variant("gqa")))
    return (
        f"A decoder-only model of {millions} parameters: {config.num_hidden_layers} layers, {config.hidden_size} wide, "
        f"{config.num_attention_heads} heads of {config.value_head_dim}, a context of "
        f"{config.max_position_embeddings:,} tokens. Its attention is `{config.attention}` with `{config.positional}` "
        f"positions. A token leaves {held:g} scalars per layer in the KV cache; grouped-query attention with as many "
        f"groups as values have here leaves {usual:g}.\n\n{_beginning(given)}"
    )


def _beginning(given: Given) -> str:
    if given.start is None:
        begun = (
            "It was trained from random weights to continue text. It follows no instructions, and says what its data "
        )
        begun += "says."
    else:
        begun = f"Its training began from the weights of `{given.start.name}` (fingerprint {given.start.fingerprint}), "
        begun += "whose licence holds for it too."
    if given.teacher is not None:
        begun += f" Its teacher was `{given.teacher.name}` (fingerprint {given.teacher.fingerprint})."
    return begun


def _serve(config: GvaConfig) -> str:
    if any(layer.rotates_late for layer in config.layer_configs):
        return "vLLM does not serve it, since its keys are rebuilt at every step; `gva generate FOLDER` continues text."
    plain = "`vllm serve path/to/this/folder` does the same without `--trust-remote-code`."
    return f"```bash\ngva serve path/to/this/folder\n```\n\nwhere vLLM is installed too; {plain}"


def _recipe(run: Path, recipe: Recipe, given: Given) -> str:
    record = read_run(run)
    said = {name: value for name, value in recipe.identity().items() if value is not None}
    if given.teacher is None:
        said = {name: value for name, value in said.items() if not name.startswith("kl_")}
    words = "\n".join(f"{name}={value}" for name, value in said.items())
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{recipe.steps:,} steps of {recipe.global_batch} sequences of {recipe.length} tokens, "
        f"{recipe.tokens:,} tokens in all; AdamW, a linear warm-up and a cosine. On {record['hardware']}; {versions}."
        f"\n\n```\n{words}\n```"
    )


def scores(run: Path) -> str:
    """The validation loss of a run and its accuracies on tasks, each at the latest step that has it."""
    loss, tasks = (max(read_metrics(run, kind), key=lambda line: line["step"], default=None) for kind in KINDS)
    parts = [] if loss is None else [_loss(loss)]
    parts.append(
        "No task has been run: `gva eval` does that." if tasks is None else f"```\n{table(tasks['results'])}\n```"
    )
    return "\n\n".join(parts)


def _loss(line: dict[str, Any]) -> str:
    return (
        f"Validation loss {line['valid_loss']:.4f} nats per token, {line['bits_per_byte']:.4f} bits per byte, over "
        f"{line['valid_tokens']:,} held-out tokens."
    )
