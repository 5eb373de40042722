"""What a run leaves for others: a folder that loads anywhere, stops where a text ends, and says what it is."""

import json
import re
import subprocess
import sys
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from gva import GvaForCausalLM
from gva.data.publish import publish, replace_section, section
from gva.data.shards import TokenDataset
from gva.data.tokenizer import load_tokenizer, train_bpe
from gva.run.folder import read_run
from gva.run.metrics import read_metrics
from gva.weights import SUMS
from models import made_to_end, tiny_model
from train.runs import ENVIRONMENT, run_here

pytestmark = pytest.mark.hf
PROMPT = "import os\n"


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "run"
    run_here(data, out, "max_position_embeddings=96", steps=4)
    return out


@pytest.fixture
def folder(run):
    return run / "model"


def test_ends_and_pads_as_its_tokenizer_says(folder, data):
    end = load_tokenizer(data / "tokenizer").end
    for file in ("config.json", "generation_config.json"):
        said = json.loads((folder / file).read_text())
        assert (said["eos_token_id"], said["pad_token_id"]) == (end, end)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.padding_side) == (end, end, "left")
    assert "eos_token_id" not in (folder.parent / "run.json").read_text().replace('"eos_token_id": null', "")


def test_generation_stops_where_a_text_ends(tmp_path):
    """In generate(), alone and in a batch, where what comes after the end is padding."""
    train_bpe(["ab " * 40], 97).save(tmp_path / "tokenizer")
    end, model = load_tokenizer(tmp_path / "tokenizer").end, tiny_model("gva-drope-16", torch.float32)
    answer = made_to_end(model, [5, 6, 7], end)
    publish(model, tmp_path / "tokenizer", tmp_path / "model", "")
    loaded = GvaForCausalLM.from_pretrained(tmp_path / "model")
    both = torch.tensor([[5, 6, 7], [9, 9, 8]])
    assert loaded.generate(both[:1], max_new_tokens=20)[0, 3:].tolist() == answer
    first, second = loaded.generate(both, max_new_tokens=20)[:, 3:].tolist()
    assert first == answer + [end] * (len(second) - len(answer))
    assert len(loaded.generate(both[1:])[0]) <= model.config.max_position_embeddings


def test_a_padding_token_of_its_own_is_kept(tmp_path):
    known = train_bpe(["ab " * 40], 97)
    known.save(tmp_path / "tokenizer", pad_token="b", padding_side="right")
    publish(tiny_model("gqa", torch.float32), tmp_path / "tokenizer", tmp_path / "model", "")
    tokenizer, model = (c.from_pretrained(tmp_path / "model") for c in (AutoTokenizer, GvaForCausalLM))
    assert model.config.pad_token_id == tokenizer.pad_token_id == known.tokenizer.token_to_id("b") != known.end
    assert tokenizer.padding_side == "right"


# ---- loaded elsewhere ----


def elsewhere(code, home):
    """A process that has not imported gva."""
    environment = {**ENVIRONMENT, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)


def test_the_code_of_the_card_runs_where_gva_was_never_imported(folder, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.S)
    code = code.replace("path/to/this/folder", str(folder))
    again = f"model.save_pretrained({str(tmp_path / 'again')!r})\nimport gva; print(type(model) is gva.GvaForCausalLM)"
    done = elsewhere(f"{code}\n{again}", tmp_path / "home")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("The")
    assert done.stdout.endswith("True\n")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"config.json", "generation_config.json", SUMS, "model.safetensors", "modeling_gva.py"}
    assert (tmp_path / "again" / "modeling_gva.py").read_text() == (folder / "modeling_gva.py").read_text()


def test_without_gva_it_says_what_to_install(folder, tmp_path):
    code = "import sys; sys.modules['gva'] = None\nfrom transformers import AutoModelForCausalLM\n"
    done = elsewhere(f"{code}AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: this model needs the Python package gva")
    assert done.stderr.rstrip().endswith("pip install grouped-value-attention")


def test_everything_that_loads_it_goes_to_the_hub(folder, monkeypatch, tmp_path):
    """`push_to_hub` up to the network: what would be uploaded is a folder that loads."""
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.hf_api import RepoUrl

    sent = {}

    def commit(self, repo_id, operations, **more):
        for operation in operations:
            with operation.as_file() as file:
                sent[operation.path_in_repo] = file.read()

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **more: RepoUrl(f"https://huggingface.co/me/{name}"))
    monkeypatch.setattr(HfApi, "create_commit", commit)
    monkeypatch.setattr(ModelCard, "load", classmethod(lambda cls, *a, **k: ModelCard("---\nlicense: mit\n---\n")))
    model = GvaForCausalLM.from_pretrained(folder)
    model.push_to_hub("toy")
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_gva.py"} <= sent.keys()
    for name, content in sent.items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.config.eos_token_id == model.config.eos_token_id


# ---- what people use around a model ----


def test_in_a_pipeline(folder):
    """Its default of 256 new tokens is more than the context: it goes on to the end of that."""
    generator = pipeline("text-generation", model=str(folder), device="cpu")
    (told,) = generator(PROMPT, do_sample=False)
    assert told["generated_text"].startswith(PROMPT)
    batch = generator([PROMPT, "def f(x):\n    return"], batch_size=2, max_new_tokens=5, do_sample=False)
    alone = generator(PROMPT, max_new_tokens=5, do_sample=False)
    assert batch[0][0]["generated_text"] == alone[0]["generated_text"]


def test_streamed_as_it_comes(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    wanted = {"max_new_tokens": 24, "do_sample": True, "temperature": 9.0}
    torch.manual_seed(0)
    whole = tokenizer.decode(model.generate(**ids, **wanted)[0, ids.input_ids.shape[1] :])
    torch.manual_seed(0)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = Thread(target=model.generate, kwargs={**ids, **wanted, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1


def test_with_a_chat_template(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}assistant:"
    said = [{"role": "user", "content": "What is a list?"}]
    ids = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)
    assert tokenizer.eos_token_id in ids["input_ids"][0]
    out = model.generate(**ids, max_new_tokens=4)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = generator(said, max_new_tokens=4, do_sample=False)
    reply = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer["generated_text"][-1] == {"role": "assistant", "content": reply}


# ---- the card ----


def test_the_card_says_what_it_is(run, data):
    text = (run / "model" / "README.md").read_text()
    found = read_metrics(run, "eval")[-1]
    index = TokenDataset(data).index
    for said in (
        "license: unknown",
        "library_name: transformers",
        "2 layers, 32 wide",
        f"{index['tokens']['train']:,} train tokens",
        "standard library of Python",
        "4 steps of 8 sequences of 48 tokens, 1,536 tokens in all",
        "lr=0.003",
        "A token leaves 80 scalars per layer",
        "with as many groups as values have here leaves 128",
        f"Validation loss {found['valid_loss']:.4f} nats per token",
        "No task has been run",
        "gva serve",
    ):
        assert said in text, said
    assert f"{read_run(run)['data']}." in text, "the run says it too, for its report"
    assert not re.search(r"[{}]", text.partition("## Recipe")[0])


def test_a_section_is_written_anew_and_the_rest_is_its_owners(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"license: mit\n{section('scores', 'old')}\nmy own words\n")
    replace_section(tmp_path, "scores", "new\nones")
    assert card.read_text() == "license: mit\n<!-- scores -->\nnew\nones\n<!-- end of scores -->\nmy own words\n"
    for text in ("no marks", "<!-- scores --> cut off"):
        card.write_text(text)
        replace_section(tmp_path, "scores", "new")
        assert card.read_text() == text
    replace_section(tmp_path / "nowhere", "scores", "new")
