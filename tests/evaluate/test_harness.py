"""Our evaluator against lm-evaluation-harness on a trained checkpoint: the same text, loglikelihoods and accuracies."""

import builtins
import json
from importlib.util import find_spec

import pytest

from gva.cli import main
from gva.evaluate.harness import evaluate_with_harness
from gva.evaluate.loading import find, load_model, load_tokenizer_of
from gva.evaluate.results import differences
from gva.evaluate.scoring import evaluate
from gva.evaluate.tasks import TASKS

ITEMS = 200  # of each task; docs/evaluation.md has the comparison on all of them
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")


def assert_equal(trained, folder, limit=0):
    place = find(trained)
    model = load_model(place, device="cpu")
    tokenizer = load_tokenizer_of(place, model.config.vocab_size)
    tasks = list(TASKS.values())
    ours = evaluate(model, tokenizer, tasks, folder, limit, progress=False)
    theirs = evaluate_with_harness(model, tokenizer, tasks, folder, limit)
    for name, found in differences(ours, theirs).items():
        assert found["same_text"], name
        assert found["largest_difference"] < 1e-4, (name, found)
        for field, value in theirs[name].result.items():
            assert ours[name].result[field] == (None if value is None else pytest.approx(value, abs=1e-12)), (
                name,
                field,
            )
    return ours, theirs


@needs_lm_eval
def test_two_hundred_items_of_each_task(trained, bench):
    ours, theirs = assert_equal(trained, bench, ITEMS)
    assert [scored.result["items"] for scored in theirs.values()] == [ITEMS] * 5
    assert len({round(x, 6) for item in ours["hellaswag"].loglikelihoods for x in item}) > 700, "they do differ"


@needs_lm_eval
def test_awkward_rows(trained, files):
    """Those handwritten, some of which do not fit the model's context."""
    ours, _ = assert_equal(trained, files)
    assert sum(scored.result["items"] for scored in ours.values()) == 21


@needs_lm_eval
def test_both_engines_on_the_command_line(trained, files, tmp_path, capsys):
    arguments = ["eval", str(trained), "--data-dir", str(files), "--device", "cpu", "--tasks", "arc_easy,winogrande"]
    assert main([*arguments, "--engine", "both", "--out", str(tmp_path / "both.json")]) == 0
    shown = capsys.readouterr().out
    assert "own against lm-eval:\n  arc_easy: largest difference of 17 loglikelihoods" in shown
    assert "NOT" not in shown
    report = json.loads((tmp_path / "both.json").read_text())
    assert report["lm_eval"]["winogrande"] == pytest.approx(report["results"]["winogrande"])
    assert main([*arguments, "--engine", "lm-eval", "--limit", "1", "--out", str(tmp_path / "one.json")]) == 0
    report = json.loads((tmp_path / "one.json").read_text())
    assert report["results"]["arc_easy"]["items"] == 1
    assert report["results"]["arc_easy"]["chance"] == pytest.approx(1 / 3)


def test_without_lm_eval_it_says_what_to_install(trained, files, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "lm_eval":
            raise ImportError("No module named 'lm_eval'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    words = ["eval", str(trained), "--data-dir", str(files), "--device", "cpu", "--tasks", "arc_easy"]
    assert main([*words, "--engine", "lm-eval"]) == 2
    assert "engine lm-eval needs: pip install 'grouped-value-attention[eval]'" in capsys.readouterr().err
    assert main(words) == 0
