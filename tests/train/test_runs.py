"""Runs: several ranks equal one, every variant learns, what went wrong is said."""

import itertools
import json
import shutil
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gva import VARIANTS, GvaForCausalLM
from gva.cli import main
from gva.data.batches import Batches
from gva.data.prepare import prepare_files
from gva.data.shards import TokenDataset
from gva.data.tokenizer import load_tokenizer
from gva.model import FeedForward
from gva.run.metrics import NonFiniteLoss, is_done, read_metrics
from gva.run.ranks import process_group
from gva.train import loop
from gva.train.recipe import build, read_overrides
from train.runs import ENVIRONMENT, SIZE, command, finish, run_here


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(tmp_path, data, variant):
    lines = run_here(data, tmp_path, "lr=0.01", variant=variant, steps=25)
    assert [line["step"] for line in lines] == list(range(1, 26))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert all(line["grad_norm_clipped"] <= line["grad_norm"] * (1 + 1e-6) for line in lines)
    assert {"lr", "tokens", "tokens_per_second", "clipped"} <= lines[0].keys()
    assert is_done(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=4, pad_token_id=0)[0]).startswith("import os")


def test_the_exported_model_is_the_trained_one(tmp_path, data):
    """Its validation loss, computed from the HuggingFace folder, is the one the run reported."""
    run_here(data, tmp_path, steps=20)
    (reported,) = [line for line in read_metrics(tmp_path, "eval") if line["step"] == 20]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    batch = Batches(TokenDataset(data, "valid"), 48, 1, 0).load([0, 1, 2, 3])
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert loss.item() == pytest.approx(reported["valid_loss"], rel=1e-5)
    assert len(reported["loss_by_position"]) == 16
    text = load_tokenizer(data / "tokenizer").tokenizer.decode(TokenDataset(data, "valid").read(1, 4 * 48 + 1).tolist())
    per_token = len(text.encode()) / (4 * 48)
    assert reported["bits_per_byte"] == pytest.approx(reported["valid_loss"] / 0.693147 / per_token, rel=1e-4)


@pytest.mark.parametrize(
    "words", [["parallel=ddp"], ["parallel=fsdp"], ["parallel=ddp", "document_mask=true"]], ids=str
)
def test_two_ranks_give_the_loss_of_one(tmp_path, data, words):
    finish(command(data, tmp_path / "one", "--steps", "20", *words))
    finish(command(data, tmp_path / "two", "--steps", "20", *words), ranks=2)
    one, two = (read_metrics(tmp_path / name, "step") for name in ("one", "two"))
    assert len(one) == len(two) == 20
    told = [json.loads((tmp_path / name / "run.json").read_text())["hardware"] for name in ("one", "two")]
    assert told == ["CPU", "2 x CPU"]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("one", "two"))
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, msg=name)


def test_torchrun_starts_it_with_the_embedded_data(tmp_path):
    """The documented launcher, and the default that one rank prepares while the other waits."""
    words = command(tmp_path, tmp_path / "out", "--steps", "4")
    words = [w for w in words if w not in ("--data", str(tmp_path))]
    launcher = [words[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launcher, *words[1:]], capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert is_done(tmp_path / "out"), done.stderr[-3000:]


def test_accumulation_and_checkpointing_change_no_loss(tmp_path, data, monkeypatch):
    calls, plain = [0], FeedForward.forward

    def counted(self, x):
        calls[0] += 1
        return plain(self, x)

    monkeypatch.setattr(FeedForward, "forward", counted)
    whole = run_here(data, tmp_path / "a", "micro_batch=8")
    once = calls[0]
    for number, words in enumerate((["micro_batch=3"], ["micro_batch=8", "activation_checkpointing=true"])):
        calls[0] = 0
        other = run_here(data, tmp_path / str(number), *words)
        assert [x["loss"] for x in other] == pytest.approx([x["loss"] for x in whole], rel=1e-5)
    assert calls[0] > 1.8 * once, "the second time round, activations were computed again"


@pytest.mark.parametrize("masked", [False, True])
def test_a_document_mask_trains_on_documents_as_if_alone(tmp_path, masked):
    """The first loss, from short packed documents, is the mean over their targets, each document by itself."""
    texts = [f"x{i} = {i * i}\n" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare_files([tmp_path / "a.jsonl"], tmp_path / "data", vocab_size=300, progress=False)
    overrides = read_overrides(None, SIZE) | {"document_mask": masked, "steps": 3}
    dataset = TokenDataset(tmp_path / "data")
    config, recipe = build("demo", "gva-drope-16", overrides, dataset.vocab_size)
    (first, *_) = run_here(tmp_path / "data", tmp_path / "out", f"document_mask={str(masked).lower()}", steps=3)
    torch.manual_seed(recipe.seed)
    model, ends = GvaForCausalLM(config).eval(), dataset.document_ends
    total, count = 0.0, 0
    for index in Batches(dataset, recipe.length, 8, 0).indices(0):
        low, high = index * recipe.length, (index + 1) * recipe.length
        cuts = [low, *ends[(ends > low) & (ends <= high)].tolist(), high + 1]
        for a, b in itertools.pairwise(cuts):
            ids = torch.from_numpy(dataset.read(a, b))[None]
            if ids.shape[1] > 1:
                logits = model(ids[:, :-1]).logits[0]
                total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
                count += ids.shape[1] - 1
    assert (first["loss"] == pytest.approx(total / count, rel=1e-5)) == masked


def test_seeds_fix_weights_and_order(tmp_path, data):
    def first(name, *words, variant="gva-drope-16"):
        return run_here(data, tmp_path / name, *words, variant=variant, steps=2)

    same, again, other = first("a"), first("b"), first("c", "seed=1")
    assert [x["loss"] for x in same] == [x["loss"] for x in again]
    assert same[0]["loss"] != other[0]["loss"]
    batches = [Batches(TokenDataset(data), 48, 8, seed).indices(0) for seed in (0, 1)]
    assert batches[0] != batches[1]
    orders = []
    for fields in ({"seed": 0}, {"seed": 1}, {"seed": 1, "data_seed": 0}):
        config, recipe = build("demo", "gqa", fields, TokenDataset(data).vocab_size)
        with process_group("cpu") as ranks:
            orders.append(loop._build(config, recipe, TokenDataset(data), ranks).batches.indices(0))
    assert orders[0] == orders[2] != orders[1]


def test_compiled_training_follows_eager(tmp_path, data):
    eager = run_here(data, tmp_path / "eager", steps=6)
    compiled = run_here(data, tmp_path / "compiled", "compile=true", steps=6)
    assert [x["loss"] for x in compiled] == pytest.approx([x["loss"] for x in eager], rel=1e-4)


def test_diagnostics_on_request(tmp_path, data):
    run_here(data, tmp_path, "diagnostics_every=10", steps=20)
    lines = read_metrics(tmp_path, "diagnostics")
    assert [line["step"] for line in lines] == [10, 20]
    heads = lines[0]["previous_token_attention"]
    assert [len(layer) for layer in heads] == [4, 4]
    assert all(0 < weight < 1 for layer in heads for weight in layer)
    assert set(lines[0]["qk_scales"][0]) == {"q_nope", "k_nope", "q_rope", "k_rope", "v"}
    assert lines[0]["second_copy_loss"] == pytest.approx(lines[0]["first_copy_loss"], abs=0.5)
    assert all("in_context_score" in line for line in read_metrics(tmp_path, "eval"))


def test_nan_stops_with_the_step_the_batch_and_what_to_try(tmp_path, data, monkeypatch):
    real = loop.train_step

    def broken(run):
        if run.step == 6:
            next(run.model.parameters()).data.fill_(float("nan"))
        return real(run)

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(
        NonFiniteLoss,
        match=r"loss nan.* at step 7: stopped; its batch was .*step 5 is from before it. Try, in another --out",
    ):
        run_here(data, tmp_path, "checkpoint_every=5", steps=20)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    monkeypatch.setattr(loop, "train_step", real)
    assert run_here(data, tmp_path, "checkpoint_every=5", steps=20)[-1]["step"] == 20


def test_a_validation_loss_that_is_no_number_is_no_result(tmp_path, data, monkeypatch):
    real = loop.measure.validate
    monkeypatch.setattr(loop.measure, "validate", lambda *a: {**real(*a), "valid_loss": float("nan")})
    with pytest.raises(NonFiniteLoss, match=r"validation loss nan at step 10: stopped.*step 5 is from before it"):
        run_here(data, tmp_path, "checkpoint_every=5", "eval_every=10", steps=20)
    assert not read_metrics(tmp_path, "eval")
    assert not is_done(tmp_path)


@pytest.mark.parametrize("spoil", ["empty", "cut short"])
def test_a_finished_run_whose_model_is_not_whole_exports_it_again(tmp_path, data, spoil):
    run_here(data, tmp_path, "checkpoint_every=4", steps=8)
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.read_bytes()

    def spoiled():
        if spoil == "empty":
            for file in (tmp_path / "model").iterdir():
                file.unlink()
        else:
            weights.write_bytes(before[:1000])

    spoiled()
    run_here(data, tmp_path, "checkpoint_every=4", steps=8)
    assert weights.read_bytes() == before
    spoiled()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(
        OSError, match=r"model: not whole, though its training is done, .*no checkpoint to export it from"
    ):
        run_here(data, tmp_path, "checkpoint_every=4", steps=8)
    assert is_done(tmp_path), "what it measured is still there"


def test_a_lost_line_that_says_a_run_is_done_does_not_train_it_again(tmp_path, data):
    """Its model says so too; without it and without a checkpoint, nothing does, and that is told."""
    run_here(data, tmp_path, steps=8)
    shutil.rmtree(tmp_path / "checkpoints")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    damaged = "\n".join([*lines[:-1], "#" + lines[-1]]) + "\n"
    (tmp_path / "metrics.jsonl").write_text(damaged)
    before = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    with pytest.warns(UserWarning, match=f"line {len(lines)} is damaged"):
        run_here(data, tmp_path, steps=8)
    assert is_done(tmp_path)
    assert read_metrics(tmp_path) == [json.loads(line) for line in lines]
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "metrics.jsonl").write_text(damaged)
    shutil.rmtree(tmp_path / "model")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(OSError, match=r"lines are damaged, one of which may say that this run is done"),
    ):
        run_here(data, tmp_path, steps=8)
    assert (tmp_path / "metrics.jsonl").read_text() == damaged


def test_a_model_that_lies_there_already_is_not_taken_for_the_result(tmp_path, data):
    run_here(data, tmp_path / "a", "seed=1", steps=4)
    shutil.copytree(tmp_path / "a" / "model", tmp_path / "b" / "model")
    assert len(run_here(data, tmp_path / "b", steps=4)) == 4
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] != weights[1]


def test_a_link_in_the_data_is_not_read_into_the_model(tmp_path, data):
    ours = shutil.copytree(data, tmp_path / "data")
    (tmp_path / "secret").write_text("secret")
    (ours / "tokenizer" / "tokenizer_extra.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"tokenizer_extra.json: a link to .*secret, outside of the folder"):
        run_here(ours, tmp_path / "out", steps=4)


def test_what_does_not_fit_is_told_before_anything_is_written(tmp_path, data):
    with pytest.raises(ValueError, match=r"length=512: exceeds max_position_embeddings=256"):
        run_here(data, tmp_path / "out", "length=512")
    with pytest.raises(ValueError, match=r"vocab_size=64: the data has 512 tokens"):
        run_here(data, tmp_path / "out", "vocab_size=64")
    assert not (tmp_path / "out").exists()


def test_a_trained_model_continues_text(tmp_path, data, capsys):
    run_here(data, tmp_path, steps=4)
    arguments = ["generate", str(tmp_path / "model"), "--max-new-tokens", "5", "--device", "cpu"]
    assert main([*arguments, "--prompt", "import os", "--prompt", "def f("]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("import os")
    assert "\ndef f(" in shown
    assert main([*arguments, "--prompt", "x", "--max-new-tokens", "5000"]) == 2
    told = "--max-new-tokens=5000: with a prompt of 1 beyond the model's context of 256 tokens"
    assert told in capsys.readouterr().err
    drawn = [*arguments, "--prompt", "import os", "--temperature", "1", "--top-k", "50", "--top-p", "0.9"]
    assert [main([*drawn, "--seed", seed]) for seed in "112"] == [0, 0, 0]
    first, again, other = (shown for shown in capsys.readouterr().out.split("import os")[1:4])
    assert first == again != other
    assert main(["generate", str(tmp_path), *arguments[2:], "--prompt", "import os"]) == 0, "a run, as for gva eval"
    assert capsys.readouterr().out.startswith("import os")
    assert main([*arguments, "--prompt", "x", "--top-k", "5"]) == 2
    assert "top_k=5: the likeliest token is taken whatever it is; give a temperature" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nothing")]) == 2
    assert "no such checkpoint" in capsys.readouterr().err
