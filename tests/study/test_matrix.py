"""What a comparison runs: the command line's matrix, a file's, and parts of either."""

import pytest

from gva.cli import main
from gva.study.matrix import DEFAULTS, Matrix, Row, choose, read_matrix, simple_matrix
from gva.train.recipe import RECIPES

FILE = """
preset = "demo"
seeds = 2
baseline = "gqa"
steps = 30

[[row]]
variant = "gqa"

[[row]]
name = "gqa-one-group"
variant = "gqa"
num_value_groups = 1
lr = 0.001

[[row]]
name = "far"
variant = "gva-drope-16"
seeds = [3, 5]
rope_theta = 500000.0
steps = 50
"""


def test_every_preset_has_a_comparison():
    assert DEFAULTS.keys() <= RECIPES.keys()
    for preset in RECIPES:
        matrix = simple_matrix(preset)
        assert matrix.rows[0].name == "gqa"
        assert all("gva" in name or name in ("gqa", "mla", "shared-kv") for name in (r.name for r in matrix.rows))
    demo = simple_matrix("demo")
    assert [row.name for row in demo.rows] == ["gqa", "shared-kv", "gva-baseline", "gva-drope-16", "gva"]
    assert len(demo.runs()) == 5


def test_a_variant_may_have_its_own_rate_and_all_rows_share_the_rest():
    matrix = simple_matrix("small", ["gqa", "mla"], 2, {"mla": 2e-3}, {"steps": 30, "eval_every": 30})
    (_, gqa), (_, mla) = (row.build("small", 1) for row in matrix.rows)
    assert (gqa.lr, mla.lr) == (RECIPES["small"]["lr"], 2e-3)
    assert (gqa.steps, gqa.eval_every, gqa.seed) == (30, 30, 1)
    assert gqa.diagnostics_every == 7, "a short run is still looked at a few times"


def test_a_file_of_rows(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text(FILE)
    matrix = read_matrix(path, {"global_batch": 4})
    assert [(row.name, row.seeds) for row in matrix.rows] == [
        ("gqa", (0, 1)),
        ("gqa-one-group", (0, 1)),
        ("far", (3, 5)),
    ]
    assert matrix.baseline == "gqa"
    built = {row.name: row.build("demo", 0) for row in matrix.rows}
    assert built["gqa-one-group"][0].num_value_groups == 1
    assert built["gqa-one-group"][1].lr == 0.001
    assert built["far"][0].rope_theta == 500000.0
    assert [recipe.steps for _, recipe in built.values()] == [30, 30, 50]
    assert {recipe.global_batch for _, recipe in built.values()} == {4}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('preset = "demo"', 'preset = "dmo"', "did you mean 'demo'"),
        ('variant = "gva-drope-16"', 'variant = "gva-drope-61"', "did you mean 'gva-drope-16'"),
        ("rope_theta", "rope_theata", "did you mean 'rope_theta'"),
        ('name = "far"', 'name = "gqa"', "two rows have this name"),
        ('name = "far"', 'name = "far/away"', "is a folder's name"),
        ("seeds = [3, 5]", "seeds = [3, 3]", "must be a positive count or a list of different integers"),
        ('baseline = "gqa"', 'baseline = "gq"', "did you mean 'gqa'"),
        ("[[row]]", "[[rows]]", "needs at least one [[row]]"),
        ('preset = "demo"', "preset = ", "not readable"),
    ],
)
def test_a_bad_file_is_told_before_anything_runs(tmp_path, old, new, message):
    path = tmp_path / "matrix.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ValueError) as told:
        read_matrix(path)
    assert message in str(told.value)


def test_a_sweep_is_every_row_at_each_rate():
    swept = simple_matrix("demo", ["gqa", "mla"], 1).sweep([1e-3, 5e-4, 1e-3])
    assert [(row.name, row.of) for row in swept.rows] == [
        ("gqa-lr0.0005", "gqa"), ("gqa-lr0.001", "gqa"), ("mla-lr0.0005", "mla"), ("mla-lr0.001", "mla"),
    ]  # fmt: skip
    assert swept.rows[0].build("demo", 0)[1].lr == 5e-4
    with pytest.raises(ValueError, match="row gqa is swept"):
        simple_matrix("demo", ["gqa"], 1, {"gqa": 1e-3}).sweep([1e-3])


def test_parts_of_a_matrix_cover_it_and_keep_seeds_together():
    matrix = Matrix("demo", tuple(Row(name, "gqa", (0, 1, 2)) for name in "abcd"))
    everything = matrix.runs()
    parts = [choose(matrix, shard=f"{i}/4") for i in range(1, 5)]
    assert [run for part in parts for run in part] == everything
    assert all(len({row.name for row, _ in part}) == 1 for part in parts)
    odd = [choose(matrix, shard=f"{i}/5") for i in range(1, 6)]
    assert [run for part in odd for run in part] == everything
    assert [(r.name, s) for r, s in choose(matrix, ["b", "d:1"])] == [("b", 0), ("b", 1), ("b", 2), ("d", 1)]
    for bad in ("0/4", "5/4", "half", "1/0"):
        with pytest.raises(ValueError, match="must be i/n"):
            choose(matrix, shard=bad)
    with pytest.raises(ValueError, match="no such ROW or ROW:SEED"):
        choose(matrix, ["d:9"])


def test_a_shard_without_runs_is_told(tmp_path, capsys):
    words = ["compare", "--preset", "demo", "--variants", "gqa", "--shard", "1/3", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "--shard='1/3': holds no run" in capsys.readouterr().err


HEALING = """
preset = "heal"
seeds = 2
teacher = "source"

[[row]]
name = "one-wide"
from = "converted/one-wide"

[[row]]
name = "source"
from = "source"
seeds = 1
"""


def test_rows_that_begin_from_checkpoints(tmp_path):
    """Where these lie is said by the file or the command line; whether they are there is asked when they are needed."""
    path = tmp_path / "matrix.toml"
    path.write_text(HEALING)
    wide, source = read_matrix(path, {"steps": 50}).rows
    assert (wide.start, wide.teacher) == (tmp_path / "converted" / "one-wide", tmp_path / "source")
    assert source.start == source.teacher == read_matrix(path, models=tmp_path).rows[1].start
    assert read_matrix(path, models=tmp_path / "else").rows[0].start == tmp_path / "else" / "converted" / "one-wide"
    assert (wide.recipe("heal", 1).steps, wide.recipe("heal", 1).seed) == (50, 1)
    swept = read_matrix(path).sweep([1e-4, 3e-4]).rows
    assert {row.start for row in swept[:2]} == {wide.start}
    with pytest.raises(FileNotFoundError, match="one-wide: no such checkpoint"):
        wide.build("heal", 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('from = "source"', 'from = "source"\nvariant = "gqa"', "variant='gqa': is that of from"),
        ('from = "source"', "from = 3", "from=3: must be the path of a checkpoint"),
        ('from = "source"', 'from = "source"\nrope_dim = 8', "rope_dim=8: a field of the model"),
        ('from = "source"', 'variant = "gqa"', "preset='heal': must be one of"),
        ("seeds = 2", "seeds = 2\ndata_seed = 0", "data_seed=0: seeds of a row with from differ in the order of data"),
    ],
)
def test_a_bad_row_with_a_checkpoint_is_told(tmp_path, old, new, message):
    path = tmp_path / "matrix.toml"
    path.write_text(HEALING.replace(old, new))
    with pytest.raises(ValueError) as told:
        read_matrix(path)
    assert message in str(told.value)
