"""Every command, snippet, figure and path in the README is true."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gva import VARIANTS, GvaConfig, cost
from gva.nn import GroupedValueAttention

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VARIANTS_PAGE = (ROOT / "docs" / "variants.md").read_text()
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def run(command, cwd):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, env={**os.environ, "PATH": PATH, "MAKEFLAGS": ""}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """The outputs of the Python snippets, run in an empty folder; later commands find there what they saved."""
    folder = tmp_path_factory.mktemp("reader")
    outputs = [run([sys.executable, "-c", snippet], folder) for snippet in blocks("python")]
    return folder, outputs


def test_the_python_snippet_runs_when_pasted(pasted):
    output = pasted[1][0]
    assert "cached scalars per token and layer: 112.0" in output
    assert re.search(r"tokens \[(\d+, ){7}\d+\]", output)
    snippet = blocks("python")[0]
    assert len([line for line in snippet.splitlines() if line.strip()]) == 10
    small = GvaConfig.preset("small")
    assert f"{cost.parameters(small)['total'] / 1e6:.0f}M parameters" in snippet
    assert f"112; GQA: {cost.cache_scalars_per_token_per_layer(GvaConfig.preset('small', 'gqa'))}" in snippet


def test_the_layer_in_a_plain_block(pasted):
    (snippet,) = [code for code in blocks("python") if "GroupedValueAttention" in code]
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 20
    (output,) = [text for text in pasted[1] if "largest difference" in text]
    assert float(output.split()[-1]) < 1e-4
    layer = GroupedValueAttention(512, 8)
    gqa = cost.cache_scalars_per_token_per_layer(GvaConfig.preset("small", "gqa"))  # of the same width and heads
    assert f"{layer.config.row.scalars} scalars a token; GQA: {gqa}" in snippet


def commands():
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("command", commands())
def test_every_command_runs(command, pasted):
    words = shlex.split(command)
    if words[0] == "make":
        # `make test` runs this test, and .ci/run runs `make demo` for real: here, only that they resolve is checked.
        assert run([*words, "-n"], ROOT)
    else:
        assert words[0] == "gva", f"the README shows a command that no test runs: {command}"
        output = run(words, pasted[0])
        expected = {
            "cost": "gva-drope-16",
            "train": "my-run/model: trained",
            "eval": "bits per byte",
            "generate": "import ",
        }
        assert expected[words[1]] in output


def test_the_table_is_what_gva_cost_counts():
    rows = re.findall(r"^\| `([\w-]+)` \|.*?\| (\d+) \| ([+-][\d.]+%) \| ([\d.]+)M \|", VARIANTS_PAGE, flags=re.M)
    assert [row[0] for row in rows] == list(VARIANTS)
    for variant, scalars, against, parameters in rows:
        config = GvaConfig.preset("paper-350m", variant=variant)
        assert int(scalars) == cost.cache_scalars_per_token_per_layer(config)
        assert against == f"{int(scalars) / 512 - 1:+.1%}"
        assert parameters == f"{cost.parameters(config)['total'] / 1e6:.1f}"


def test_named_files_exist_and_the_picture_is_current():
    for path in re.findall(r"[`(]((?:src|docs|tests)/[\w./-]+)[`)]", README):
        assert (ROOT / path).exists(), path
    drawn = run([sys.executable, "docs/draw_attention_variants.py"], ROOT)
    assert drawn == (ROOT / "docs/attention-variants.svg").read_text()
