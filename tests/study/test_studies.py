"""The matrices of the studies can be built, and say what they claim."""

from pathlib import Path

import pytest

from gva import cost
from gva.data.recall import write_recall
from gva.data.source import make_batches, open_data
from gva.study.matrix import read_matrix

FOLDER = Path(__file__).parents[2] / "studies"
STUDIES = sorted(FOLDER.glob("*/*.toml"))
TOKENS = {
    "small/1-longer": 3 * 78_643_200,
    "medium/6-tasks": 250_019_840,
    "frontier/c-medium": 250_019_840,
    "conversion/forms": 52_428_800,
}


def step(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", STUDIES, ids=step)
def test_every_row_is_a_different_model_or_recipe(path):
    matrix = read_matrix(path)
    recipes = [row.recipe(matrix.preset, 0) for row in matrix.rows]
    models = [row.start or row.build(matrix.preset, 0)[0].to_dict() for row in matrix.rows]
    assert len({(str(model), str(recipe)) for model, recipe in zip(models, recipes, strict=True)}) == len(matrix.rows)
    assert {recipe.tokens for recipe in recipes} == {TOKENS.get(step(path), 78_643_200)}


def test_the_rows_that_decide_the_claim_have_the_caches_they_are_named_for():
    deciding = [FOLDER / "small" / f"{name}.toml" for name in ("1-seeds", "2-variants")]
    rows = {row.name: row for path in deciding for row in read_matrix(path).rows}
    scalars = {
        name: cost.cache_scalars_per_token_per_layer(rows[name].build("small", 0)[0])
        for name in ("gqa", "gva-drope-16", "gva-drope-16-twice-the-groups", "gqa-half-the-groups")
    }
    assert scalars == {
        "gqa": 256, "gva-drope-16": 144, "gva-drope-16-twice-the-groups": 272, "gqa-half-the-groups": 128,
    }  # fmt: skip


@pytest.mark.parametrize("path", [p for p in STUDIES if p.parent.name == "frontier"], ids=step)
def test_the_frontier_compares_models_of_one_size_and_recipe(path):
    matrix = read_matrix(path)
    built = {row.name: row.build(matrix.preset, row.seeds[0]) for row in matrix.rows}
    gqa = (
        built["gqa"]
        if "gqa" in built
        else read_matrix(FOLDER / "frontier" / "d-results.toml").rows[0].build("small", 0)
    )
    wanted = cost.parameters(gqa[0])["total"]
    for name, (config, recipe) in built.items():
        assert cost.parameters(config)["total"] == pytest.approx(wanted, rel=0.005), name
        assert recipe.eval_sequences == 512
        assert config.max_position_embeddings == recipe.length
        assert recipe.warmup == (100 if name.endswith("short-warm-up") else 300)


def test_the_frontier_reports_no_row_on_a_seed_that_it_was_chosen_on():
    seeds = {step(p): {seed for row in read_matrix(p).rows for seed in row.seeds} for p in STUDIES}
    chosen, reported = ([seeds[f"frontier/{name}"] for name in names] for names in (
        ("a-recipes", "b-refinements"), ("c-medium", "d-results", "e-rows", "g-context")
    ))  # fmt: skip
    assert set.union(*chosen) <= set(range(100, 103))
    assert set.union(*reported) <= set(range(5, 13))


def test_the_frontier_s_rows_have_the_caches_that_are_told_of_them():
    def scalars(name):
        rows = read_matrix(FOLDER / "frontier" / f"{name}.toml").rows
        return [cost.cache_scalars_per_token_per_layer(row.build("small", 0)[0]) for row in rows]

    assert scalars("b-refinements") == [160, 160, 160, 112, 112, 112, 160, 168, 160, 160, 176, 256, 160, 256, 160, 160]
    assert scalars("c-medium") == [384, 128, 224, 112]
    assert scalars("d-results") == [256, 128, 160, 112]
    assert scalars("e-rows") == [80, 96, 144, 176, 96, 64, 160, 80, 144, 240]


def test_recall_asks_every_row_the_same(tmp_path):
    write_recall(tmp_path)
    matrix, data = read_matrix(FOLDER / "recall.toml"), open_data(tmp_path)
    built = [row.build(matrix.preset, row.seeds[0], data.vocab_size) for row in matrix.rows]
    for config, recipe in built:
        make_batches(data, recipe.length, recipe.global_batch, 0, recipe.document_mask)
        assert recipe.tokens_per_step == 65_664
        assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (8192, 2, 128)
        assert config.max_position_embeddings == 3 * 256
    scalars = [cost.cache_scalars_per_token_per_layer(config) for config, _ in built]
    assert scalars == [128, 64, 80, 56, 72, 80, 80, 80, 120, 96, 80, 72, 40, 64]
