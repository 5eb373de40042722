"""A checkpoint of others gives the same logits as ours; what cannot is refused by name, and nothing is written."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from gva import GvaForCausalLM
from gva.cli import main
from gva.convert import importer
from gva.convert.importer import import_checkpoint
from gva.run.files import FolderError
from sources import CASES, LLAMA3, random_model, saved, write_gguf

pytestmark = pytest.mark.hf


def assert_same_logits(theirs, folder):
    """Both round in float32; ours in float64 says which logits are meant. Theirs may be as far from them as twice ours,
    and two roundings more."""
    ours = GvaForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(1, 98, (2, 80))
    with torch.no_grad():
        found, rounded = theirs(ids).logits, ours(ids).logits
        meant = ours.double()(ids).logits
    error = (rounded - meant).abs().max() * 2 + 2 * torch.finfo(rounded.dtype).eps * meant.abs().max()
    assert (found - meant).abs().max() <= error


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_transformers(case, tmp_path):
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path / "source")
    config, has_tokenizer = import_checkpoint(tmp_path / "source", tmp_path / "ours")
    assert (config.attention, config.num_value_groups) == ("gqa", theirs.config.num_key_value_heads)
    assert not has_tokenizer
    assert_same_logits(theirs, tmp_path / "ours")


def test_shards_and_their_dtype_stay(tmp_path, monkeypatch):
    theirs = saved(tmp_path / "source", dtype=torch.bfloat16, max_shard_size="30KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    monkeypatch.setattr(importer, "SHARD_BYTES", 30_000)
    import_checkpoint(tmp_path / "source", tmp_path / "ours")
    files = list((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 35_000, "no more than that is in memory at a time"
    ours = GvaForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert ours.dtype == torch.bfloat16
    held, given = ours.state_dict(), theirs.state_dict()
    assert held.keys() == given.keys()
    assert all(torch.equal(held[name], given[name]) for name in given)
    import_checkpoint(tmp_path / "source", tmp_path / "wide", torch.float32)
    assert GvaForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto").dtype == torch.float32


def test_what_belongs_to_the_model_travels_along(tmp_path):
    saved(tmp_path / "source")
    (tmp_path / "source" / "LICENSE").write_text("as you like")
    assert main(["import", str(tmp_path / "source"), "--out", str(tmp_path / "ours")]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (tokenizer.encode("t7 t9"), tokenizer.eos_token) == ([7, 9], "t2")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "t5"}], tokenize=False) == "t5"
    assert (tmp_path / "ours" / "LICENSE").read_text() == "as you like"


FOREIGN = {
    "qwen3": ({"model_type": "qwen3"}, "model_type='qwen3' .norms of queries and keys"),
    "unknown": ({"model_type": "mystery"}, "model_type='mystery'"),
    "window": ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64"),
    "windows of layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "sliding_window=64",
    ),
    "soft cap": ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts=8 .experts"),
    "latent": ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, "kv_lora_rank=512 .*MLA"),
    "granite": ({"model_type": "granite", "embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "rotation": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config=.*gptq"),
    "ours": ({"model_type": "gva"}, "model_type='gva' .one of ours"),
}


def test_a_folder_of_others_is_refused_with_what_takes_it_in(source, capsys):
    told = "model_type='llama': .*gva import .*gva convert"
    with pytest.raises(ValueError, match=told):
        GvaForCausalLM.from_pretrained(source)
    assert main(["generate", str(source), "--prompt", "t5"]) == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    saved(folder)
    return folder


def altered(source, target, config=None, tensors=None):
    target.mkdir()
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, **(config or {})}))
    save_file({**load_file(source / "model.safetensors"), **(tensors or {})}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("case", FOREIGN)
def test_what_cannot_be_represented_is_refused_by_name(case, source, tmp_path, capsys):
    fields, told = FOREIGN[case]
    with pytest.raises(ValueError, match=told):
        import_checkpoint(altered(source, tmp_path / "source", fields), tmp_path / "out" / "ours")
    assert not (tmp_path / "out").exists()


def test_a_window_as_long_as_the_context_is_none(source, tmp_path):
    fields = {"model_type": "mistral", "sliding_window": 128}
    import_checkpoint(altered(source, tmp_path / "source", fields), tmp_path / "ours")


def test_tensors_that_do_not_fit_are_refused_by_name(source, tmp_path):
    cases = {
        "q_norm.weight has no place": {"tensors": {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}},
        "q_proj.bias is missing": {"config": {"attention_bias": True}},
        r"lm_head.weight has the shape \(4, 48\), not \(98, 48\)": {"tensors": {"lm_head.weight": torch.ones(4, 48)}},
        "norm.weight is I64": {"tensors": {"model.norm.weight": torch.ones(48, dtype=torch.int64)}},
        "differs from the embedding": {"config": {"tie_word_embeddings": True}},
    }
    for number, (told, changes) in enumerate(cases.items()):
        with pytest.raises(FolderError, match=told):
            import_checkpoint(altered(source, tmp_path / str(number), **changes), tmp_path / "ours")
    old = altered(source, tmp_path / "old", tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    import_checkpoint(old, tmp_path / "ours")


def test_nothing_is_half_written_nor_written_over(source, tmp_path, monkeypatch, capsys):
    out = tmp_path / "ours"

    def killed(folder, tensors):
        next(tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(importer, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(source, out)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".ours.saving-killed").mkdir()
    assert main(["import", str(source), "--out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert main(["import", str(source), "--out", str(out)]) == 2
    assert "there is something already" in capsys.readouterr().err
    assert before == {file: file.stat().st_mtime_ns for file in out.iterdir()}


def test_a_source_without_what_is_needed(source, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUFx")
    with pytest.raises(FileNotFoundError, match=r"give the file itself, .*model\.gguf"):
        import_checkpoint(tmp_path, tmp_path / "ours")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="no safetensors there"):
        import_checkpoint(tmp_path, tmp_path / "ours")


# ---- GGUF ----


@pytest.mark.parametrize("case", ["llama 2", "smollm2", "biases", "mistral", "qwen2"])
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_of(case, tmp_path):
    pytest.importorskip("gguf")
    theirs = random_model(case)
    write_gguf(tmp_path / "model.gguf", theirs)
    assert import_checkpoint(tmp_path / "model.gguf", tmp_path / "ours")[1]
    assert_same_logits(theirs, tmp_path / "ours")


def test_frequencies_that_a_gguf_file_writes_out_are_kept(tmp_path):
    """llama.cpp has no rope type llama3: it divides each frequency by a factor that the file holds."""
    pytest.importorskip("gguf")
    theirs = random_model("llama 3")
    stretched = theirs.model.rotary_emb.inv_freq
    plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    write_gguf(tmp_path / "model.gguf", theirs, factors=plain / stretched)
    config, _ = import_checkpoint(tmp_path / "model.gguf", tmp_path / "ours")
    torch.testing.assert_close(torch.tensor(config.rope_frequencies), stretched)
    assert_same_logits(theirs, tmp_path / "ours")


def test_a_quantised_file_is_what_transformers_makes_of_it(tmp_path):
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "model.gguf", random_model("smollm2", hidden_size=96, head_dim=16), quantised=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    import_checkpoint(tmp_path / "model.gguf", tmp_path / "ours")
    assert_same_logits(theirs, tmp_path / "ours")
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == [2, 3]
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").chat_template == "{{ messages[0]['content'] }}"


def test_a_gguf_file_that_says_more_is_refused_by_name(tmp_path):
    pytest.importorskip("gguf")
    model, file = random_model("llama 2"), tmp_path / "model.gguf"
    cases = {
        "sliding_window=64": {"attention__sliding_window": 64},
        "num_experts=8": {"expert_count": 8},
        "partial_rotary_factor=0.5": {"attention__key_length": 16, "rope__dimension_count": 8},
        "yarn": {"rope__scaling__type": "yarn"},
    }
    for told, metadata in cases.items():
        write_gguf(file, model, **metadata)
        with pytest.raises(ValueError, match=told):
            import_checkpoint(file, tmp_path / "ours")
    whole = file.read_bytes()
    for torn in (whole[:1000], whole[: len(whole) // 2], b"not GGUF"):
        file.write_bytes(torn)
        with pytest.raises(FolderError, match="not a whole GGUF file"):
            import_checkpoint(file, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
