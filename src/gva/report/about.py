"""What was compared: what each row is, and the model, the data and the recipe that they share."""

from collections.abc import Callable

from gva import cost
from gva.report.style import FAMILIES, family, label
from gva.report.tables import Table
from gva.study.results import ComparedRow, Results

# Fields that the family and what is cached leave open, and what they are in most rows.
_OPEN = {"map_init": "scale_matched", "rope_allocation": "carved", "query_norm": False, "layers": None}


def rows_table(results: Results) -> Table:
    """A line for each row that says what its name stands for, and what it was trained with."""
    columns: dict[str, Callable[[ComparedRow], str]] = {
        "what it is": lambda row: what(results, row),
        "parameters": lambda row: f"{cost.parameters(row.config)['total'] / 1e6:.1f}M",
        "learning rate": lambda row: f"{row.lr:g}",
        "warm-up": lambda row: f"{warmup(row):,}",
        "seeds": lambda row: f"{len(row.seeds)} ({listed(row.seeds)})",
    }
    rows = [(row.name, False, [label(row.name), *(read(row) for read in columns.values())]) for row in results.rows]
    return Table(["", *columns], rows, text=(1,))


def what(results: Results, row: ComparedRow) -> str:
    """A row in words: its family, what a token leaves in its cache, and in what else it is not as the baseline."""
    name = FAMILIES[family(row)].name if family(row) not in ("", "gqa") else row.config.attention.upper()
    own = [f"{k}={getattr(row.config, k)}" for k, usual in _OPEN.items() if getattr(row.config, k) not in (usual, None)]
    words = f"{name}: caches {cached(row)}" + "".join(f", {part}" for part in own) + "."
    other = [part for part in results.differing.get(row.name, []) if not part.startswith("lr ")]
    return words + (f" Not as {label(results.baseline)}: {', '.join(other)}." if other else "")


def cached(compared: ComparedRow) -> str:
    """What a token leaves in a layer, in words."""
    row = compared.config.row
    values = row.content[-1]
    groups = "one group" if values.heads == 1 else f"{values.heads} groups"
    kind = "keys and values" if len(row.content) > 1 else "values"
    said = f"a latent of {values.width}" if values.shared else f"{kind} of {groups}, {values.width} wide"
    return said if row.rope is None else f"{said}, and a rotated key of {row.rope.width}"


def facts(results: Results) -> dict[str, str]:
    """Model, data and recipe of all rows in words, and what is not alike in all of them."""
    found = {"Model": _model(results), "Data": _data(results), "Recipe": _recipe(results)}
    return found | ({"To know": "\n".join(results.told)} if results.told else {})


def _model(results: Results) -> str:
    config = results.row(results.baseline).config
    return (
        f"{config.num_hidden_layers} layers, {config.hidden_size:,} wide, {config.num_attention_heads} heads of "
        f"{config.value_head_dim}; feed-forward {config.intermediate_size:,}; vocabulary {config.vocab_size:,}; "
        f"context {config.max_position_embeddings:,}; {parameters(results)} parameters."
    )


def warmup(row: ComparedRow) -> int:
    return row.runs[0].identity["recipe"].get("warmup", 0)


def parameters(results: Results) -> str:
    return _range([cost.parameters(row.config)["total"] for row in results.rows], amount)


def _data(results: Results) -> str:
    run = results.row(results.baseline).runs[0]
    found, name = run.identity["data"], results.data.rstrip(".") or "not recorded by name"
    return (
        f"{name}. {amount(run.tokens)} tokens in training; loss on {run.last_eval['valid_tokens']:,} tokens held out. "
        f"Fingerprints: train {found['train']}, validation {found['valid']}."
    )


def _recipe(results: Results) -> str:
    """What the optimizer was told, the warm-up among it; a range where rows were not told the same."""
    recipe = results.row(results.baseline).runs[0].identity["recipe"]
    rates = _range([row.lr for row in results.rows], "{:g}".format)
    warmups = _range([warmup(row) for row in results.rows], "{:,}".format)
    said = (
        f"{recipe['steps']:,} steps of {recipe['global_batch']} sequences of {recipe['length']:,} tokens. Learning "
        f"rate {rates}: a linear warm-up over {warmups} steps, then a cosine to {recipe['min_lr']:g} of it."
    )
    usual = {"steps", "global_batch", "length", "seed", "lr", "warmup", "min_lr"}
    if not results.references:  # no teacher
        usual |= {"kl_weight", "kl_temperature"}
    others = ", ".join(f"{name}={value}" for name, value in recipe.items() if name not in usual and value is not None)
    return f"{said} Also: {others}."


def _range(numbers: list[int] | list[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(numbers)), shown(max(numbers))
    return low if low == high else f"{low} to {high}"


def listed(numbers: list[int]) -> str:
    """Seeds, say: "0, 1, 4", or "0 to 7" where they follow one another."""
    whole = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def amount(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
