"""The matrices of the studies can be built, and say what they claim."""

from pathlib import Path

import pytest

from gva import cost
from gva.study.matrix import read_matrix

FOLDER = Path(__file__).parents[2] / "studies"
STUDIES = sorted(FOLDER.glob("*/*.toml"))


def step(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", STUDIES, ids=step)
def test_every_row_is_a_different_model_or_recipe(path):
    matrix = read_matrix(path)
    built = [row.build(matrix.preset, 0) for row in matrix.rows]
    assert len({(str(config.to_dict()), str(recipe)) for config, recipe in built}) == len(matrix.rows)
    tokens = {"small/1-longer": 3 * 78_643_200, "medium/6-tasks": 250_019_840}.get(step(path), 78_643_200)
    assert all(recipe.tokens == tokens for _, recipe in built)


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
    wanted = cost.parameters(built["gqa"][0])["total"]
    for name, (config, recipe) in built.items():
        assert cost.parameters(config)["total"] == pytest.approx(wanted, rel=0.005), name
        assert recipe.eval_sequences == 512
        assert recipe.warmup == (100 if name.endswith("short-warm-up") else 300)
