"""Trained further, alone or with a teacher: the loss that is meant, the same after any kill, and what is refused."""

import json
import shutil
import sys

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig

from gva import GvaForCausalLM
from gva.cli import main
from gva.data.batches import Batches
from gva.data.prepare import prepare_files
from gva.data.shards import TokenDataset
from gva.run.metrics import read_metrics
from gva.train import loop
from gva.train.recipe import further, read_overrides
from gva.train.trained import open_given
from models import tiny_model
from train.runs import SIZE, finish, kill_when, run_here

RECIPE = [word for word in SIZE if word.split("=")[0] in ("length", "global_batch", "micro_batch", "eval_sequences")]
RECIPE += ["eval_every=20", "log_every=5", "warmup=2", "lr=1e-3"]


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    """A run of grouped-query attention, with its checkpoints: what others are healed towards."""
    out = tmp_path_factory.mktemp("source") / "run"
    run_here(data, out, "checkpoint_every=10", variant="gqa", steps=20)
    return out


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    """Another attention, of another width, that still has to learn."""
    out = tmp_path_factory.mktemp("start") / "run"
    run_here(data, out, "hidden_size=48", steps=8)
    return out / "model"


def train_here(data, out, start, teacher, *words, steps=6):
    given = open_given(start, teacher)
    recipe = further("demo", read_overrides(None, [*RECIPE, *words]) | {"steps": steps})
    loop.train(given.start.config, recipe, data, out, given=given, device="cpu", progress=False)
    return read_metrics(out, "step")


def command(data, out, start, *words):
    named = ["--from", str(start), "--preset", "demo", "--data", str(data), "--out", str(out), "--device", "cpu"]
    return [sys.executable, "-m", "gva.cli", "train", *named, *RECIPE, *words]


def numbers(out):
    return [(line["step"], line["loss"], line["objective"], line["kl"], line["grad_norm"]) for line in out]


# ---- what is learned ----


@pytest.mark.parametrize("which", ["model", ".", "checkpoints/step-00000020"])
def test_it_begins_where_the_weights_were(tmp_path, data, source, which):
    lines = train_here(data, tmp_path, source / which, None, "lr=0.003", steps=20)
    first, last = read_metrics(tmp_path, "eval")
    (before,) = read_metrics(source, "eval")
    assert (first["step"], first["valid_loss"]) == (0, pytest.approx(before["valid_loss"], rel=1e-6))
    assert last["valid_loss"] < first["valid_loss"] - 0.1
    assert "kl" not in lines[0]
    assert not read_metrics(tmp_path, "teacher")
    ours, theirs = (GvaForCausalLM.from_pretrained(run / "model").config.to_dict() for run in (tmp_path, source))
    assert ours == {**theirs, "_name_or_path": ours["_name_or_path"]}


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_next_token_and_the_teacher_over_what_counts(tmp_path, masked):
    """By plain torch, each packed document by itself where documents are masked."""
    texts = [f"x{i} = {i * i}\n" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare_files([tmp_path / "a.jsonl"], tmp_path / "data", vocab_size=300, progress=False)
    data, paths = TokenDataset(tmp_path / "data"), {}
    for name, variant in (("start", "gva-drope-16"), ("teacher", "gqa")):
        paths[name] = tmp_path / name
        tiny_model(variant, torch.float32, seed=len(name), vocab_size=320).save_pretrained(paths[name])
    words = ["kl_weight=0.7", "kl_temperature=1.5", f"document_mask={str(masked).lower()}"]
    (first, *_) = train_here(data.folder, tmp_path / "out", paths["start"], paths["teacher"], *words, steps=2)
    model, teacher = (GvaForCausalLM.from_pretrained(path).double().eval() for path in paths.values())
    losses = []
    for index in Batches(data, 48, 8, 0).indices(0):
        low, high = index * 48, (index + 1) * 48
        ends = data.document_ends
        inner = ends[(ends > low) & (ends <= high)].tolist() if masked else []
        for a, b in zip([low, *inner], [*inner, high + 1], strict=True):
            ids = torch.from_numpy(data.read(a, b))[None]
            if ids.shape[1] > 1:
                ours, theirs = (m(ids[:, :-1]).logits[0].detach() for m in (model, teacher))
                cross = functional.cross_entropy(ours, ids[0, 1:], reduction="none")
                soft = [(x / 1.5).log_softmax(-1) for x in (ours, theirs)]
                losses.append(torch.stack([cross, functional.kl_div(*soft, log_target=True, reduction="none").sum(-1)]))
    loss, kl = torch.cat(losses, 1).mean(1).tolist()
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["kl"] == pytest.approx(kl, rel=1e-5)
    assert first["objective"] == pytest.approx(loss + 0.7 * 1.5**2 * kl, rel=1e-5)


def test_it_moves_towards_its_teacher_whose_loss_is_known(tmp_path, data, start, source):
    lines = train_here(data, tmp_path, start, source, "lr=0.003", "kl_weight=5.0", steps=30)
    assert lines[-1]["kl"] < lines[0]["kl"] / 2
    (told,), (before, *_) = read_metrics(tmp_path, "teacher"), read_metrics(source, "eval")
    assert (told["step"], told["valid_loss"]) == (0, pytest.approx(before["valid_loss"], rel=1e-6))
    assert [line["step"] for line in read_metrics(tmp_path, "eval")] == [0, 20, 30]
    mine = train_here(data, tmp_path / "self", source, source, steps=2)
    assert abs(mine[0]["kl"]) < 1e-6, "it is its own teacher"


def test_a_weight_of_nothing_is_no_teacher(tmp_path, data, start, source):
    alone = train_here(data, tmp_path / "alone", start, None)
    unasked = train_here(data, tmp_path / "unasked", start, source, "kl_weight=0.0")
    assert [(x["loss"], x["grad_norm"]) for x in unasked] == [(x["loss"], x["grad_norm"]) for x in alone]
    assert read_metrics(tmp_path / "unasked", "teacher"), "it is still measured"


def test_accumulation_compilation_and_checkpointing_change_no_loss(tmp_path, data, start, source):
    whole = numbers(train_here(data, tmp_path / "a", start, source, "micro_batch=8"))
    for number, words in enumerate((["micro_batch=3"], ["activation_checkpointing=true"], ["compile=true"])):
        other = numbers(train_here(data, tmp_path / str(number), start, source, *words))
        for ours, theirs in zip(other, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), words


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_give_the_loss_of_one(tmp_path, data, start, source, parallel):
    words = ["--teacher", str(source), "--steps", "10", "document_mask=true", f"parallel={parallel}"]
    finish(command(data, tmp_path / "two", start, *words), ranks=2)
    one = train_here(data, tmp_path / "one", start, source, "document_mask=true", steps=10)
    for ours, theirs in zip(numbers(read_metrics(tmp_path / "two", "step")), numbers(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for kind in ("teacher", "eval"):
        losses = [[line["valid_loss"] for line in read_metrics(tmp_path / name, kind)] for name in ("one", "two")]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ---- going on ----


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "ddp"), (2, "fsdp")])
def test_a_kill_changes_nothing(tmp_path, data, start, source, ranks, parallel):
    words = ["--teacher", str(source), "--steps", "24", "checkpoint_every=4", f"parallel={parallel}"]
    runs = [tmp_path / name for name in ("whole", "torn")]
    finish(command(data, runs[0], start, *words), ranks=ranks)
    again = command(data, runs[1], start, *words)
    assert kill_when(again, lambda: any((runs[1] / "checkpoints").glob("step-0000000[89]")), ranks=ranks)
    finish(again, ranks=ranks)
    whole, torn = ([line for line in read_metrics(run) if line["kind"] != "step"] for run in runs)
    assert torn == whole
    assert numbers(read_metrics(runs[1], "step")) == numbers(read_metrics(runs[0], "step"))
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_what_it_began_with_is_told_once(tmp_path, data, start, source, monkeypatch):
    def broken(run):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", broken)
        with pytest.raises(KeyboardInterrupt):
            train_here(data, tmp_path, start, source)
    train_here(data, tmp_path, start, source)
    assert [(x["kind"], x["step"]) for x in read_metrics(tmp_path) if x["step"] == 0] == [("teacher", 0), ("eval", 0)]


def test_other_weights_are_another_run(tmp_path, data, start, source):
    train_here(data, tmp_path, start, source)
    with pytest.raises(ValueError, match=r"differs in weights.teacher: '\w{16}' -> None"):
        train_here(data, tmp_path, start, None)
    changed = shutil.copytree(start, tmp_path / "changed")
    model = GvaForCausalLM.from_pretrained(changed)
    model.lm_head.weight.data[0, 0] += 1e-3
    model.save_pretrained(changed)
    with pytest.raises(ValueError, match=r"differs in weights.from: '\w{16}' -> '\w{16}'; give the same"):
        train_here(data, tmp_path, changed, source)
    moved = shutil.copytree(start, tmp_path / "moved")
    assert len(train_here(data, tmp_path, moved, source)) == 6, "where they lie does not matter"


# ---- what it leaves ----


def test_the_tokenizer_and_what_ends_an_answer_stay(tmp_path, data, start):
    ours = shutil.copytree(start, tmp_path / "start")
    (ours / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (ours / "conversion.json").write_text("{}")
    (ours / "LICENSE").write_text("as you like")
    GenerationConfig(eos_token_id=[0, 5], pad_token_id=3).save_pretrained(ours)
    settings = json.loads((ours / "tokenizer_config.json").read_text()) | {"model_max_length": 77}
    (ours / "tokenizer_config.json").write_text(json.dumps(settings))
    train_here(data, tmp_path / "out", ours, None, steps=2)
    model = tmp_path / "out" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (model / name).read_bytes() == (ours / name).read_bytes(), name
    assert (model / "conversion.json").is_file()
    assert GvaForCausalLM.from_pretrained(model).generation_config.eos_token_id == [0, 5]
    assert AutoTokenizer.from_pretrained(model).apply_chat_template([{"content": "x"}], tokenize=False) == "x"
    card = (model / "README.md").read_text()
    assert "Its training began from the weights of `start` (fingerprint " in card
    assert "random weights" not in card
    assert "kl_weight" not in card


# ---- what is refused, before anything is written ----


def refused(capsys, tmp_path, *words):
    assert main(["train", "--out", str(tmp_path / "out"), "--device", "cpu", *words]) == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err


def test_what_does_not_fit_is_told(tmp_path, data, start, source, capsys):
    known = ["--from", str(start), "--data", str(data)]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    for words in (["--from", str(tmp_path / "theirs")], [*known, "--teacher", str(tmp_path / "theirs")]):
        said = refused(capsys, tmp_path, *words, "--data", str(data))
        assert "theirs: model_type='llama': not a checkpoint of this package; gva import takes it in" in said
    assert "no such checkpoint" in refused(capsys, tmp_path, "--from", str(tmp_path / "nothing"))
    assert "--variant='gqa': the attention is that of --from" in refused(capsys, tmp_path, *known, "--variant", "gqa")
    assert "rope_dim=8: a field of the model" in refused(capsys, tmp_path, *known, "rope_dim=8")
    assert "kl_temperature=0.0: must be positive" in refused(capsys, tmp_path, *known, "kl_temperature=0")
    assert "length=1024: exceeds max_position_embeddings=256" in refused(capsys, tmp_path, *known)
    assert "--data=None: --from needs text, or data of its tokenizer" in refused(capsys, tmp_path, "--from", str(start))
    assert "--preset=None: give a size and recipe" in refused(capsys, tmp_path)


def test_data_of_another_tokenizer_is_refused(tmp_path, start, source, capsys):
    (tmp_path / "a.txt").write_text("some words " * 500)
    (tmp_path / "b.txt").write_text("other words " * 500)
    inputs = {"valid": [tmp_path / "b.txt"], "progress": False}
    prepare_files([tmp_path / "a.txt"], tmp_path / "own", vocab_size=300, **inputs)
    said = refused(capsys, tmp_path, "--from", str(start), "--data", str(tmp_path / "own"), *RECIPE)
    assert f"gva data prepare TEXT --tokenizer {start / 'tokenizer.json'} --out FOLDER" in said
    file = start / "tokenizer.json"
    prepare_files([tmp_path / "a.txt"], tmp_path / "ours", tokenizer=file, end="<|endoftext|>", **inputs)
    train_here(tmp_path / "ours", tmp_path / "out", start, source, steps=2)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path, data, start, capsys):
    tiny_model("gqa", torch.float32, vocab_size=576).save_pretrained(tmp_path / "wide")
    words = ["--from", str(start), "--teacher", str(tmp_path / "wide"), "--data", str(data), *RECIPE]
    assert "wide': has a vocabulary of 576, the model one of 512" in refused(capsys, tmp_path, *words)
