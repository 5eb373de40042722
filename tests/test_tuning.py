"""Tuned with what people use: PEFT's adapters on every projection and map, quantised layers, Trainer, TRL."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="needs PEFT: make test")

import peft
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from gva import VARIANTS, PagedGenerator
from gva.data.publish import publish
from gva.data.tokenizer import train_bpe
from models import tiny_model, tokens

pytestmark = pytest.mark.hf
NEW = 8


def adapted(model, **options):
    """An adapter that does something from the start, as a trained one does."""
    options = {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM", **options}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return tuned.eval()


def greedy(model, ids):
    return model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
        :, ids.shape[1] :
    ].tolist()


def forms(config):
    return ("expanded", "absorbed") if config.absorbs else ("expanded",)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_on_everything_count_in_every_form(variant, options, tmp_path):
    """Merged into the weights, saved and loaded again, decoding from a cache: all the same model."""
    tuned, ids = adapted(tiny_model(variant), **options), tokens(2, 9)
    maps = type(tuned.get_base_model().model.layers[0].self_attn).maps(tuned.config)
    reached = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in tuned.named_parameters() if "lora_A" in name}
    assert reached >= {*maps, "q_proj", "o_proj", "up_proj"}
    want, said = tuned(ids, use_cache=False).logits, greedy(tuned, ids)
    for form in forms(tuned.config):
        torch.testing.assert_close(tuned(ids, attention_form=form, use_cache=False).logits, want, rtol=0, atol=1e-9)
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model(variant), tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, want, rtol=0, atol=1e-9)
    paged = PagedGenerator(tuned.get_base_model(), 2, 32, page=4)
    assert paged.generate(ids.tolist(), NEW) == said
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, want, rtol=0, atol=1e-9)
    assert greedy(merged, ids) == said


@pytest.mark.parametrize(("variant", "names"), [("gva-drope-16", ["key_map"]), ("mla", ["k_up_proj", "v_up_proj"])])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_maps_alone_can_be_tuned(variant, names, form):
    tuned, ids = adapted(tiny_model(variant, std=0.05), target_modules=names), tokens(2, 12)
    learning = [p for p in tuned.parameters() if p.requires_grad]
    assert len(learning) == 2 * 2 * len(names)
    optimizer, losses = torch.optim.Adam(learning, lr=0.03), []
    for _ in range(12):
        loss = tuned(ids, labels=ids, use_cache=False, attention_form=form).loss
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in learning)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


class Quantised(nn.Linear):
    """As such layers are: codes in `weight`, and scales that only `forward` knows."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.scales = plain.weight.abs().amax(1, keepdim=True) / 127
        codes = (plain.weight / self.scales).round().to(torch.int8)
        self.weight = nn.Parameter(codes.flatten()[:, None], requires_grad=False)

    @property
    def whole(self):
        return self.weight.view(self.out_features, -1).to(self.scales.dtype) * self.scales

    def forward(self, x):
        return nn.functional.linear(x, self.whole.to(x.dtype))


@torch.no_grad()
@pytest.mark.parametrize("variant", ["mla", "gva-drope-16", "gva-baseline"])
def test_quantised_layers_stand_in_for_maps(variant):
    model, rounded, ids = tiny_model(variant), tiny_model(variant), tokens(2, 9)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            stand_in = Quantised(module)
            model.model.set_submodule(name, stand_in)
            rounded.model.get_submodule(name).weight.copy_(stand_in.whole)
    for form in forms(model.config):
        out = model(ids, attention_form=form, use_cache=False).logits
        torch.testing.assert_close(out, rounded(ids).logits, rtol=0, atol=1e-9)
    assert greedy(model, ids) == greedy(rounded, ids)


def test_a_plain_map_is_read_and_not_called():
    """One product less at every step; what takes a Linear's place alone is asked for what it computes."""
    model = tiny_model("gva-drope-16")
    for name, module in model.named_modules():
        if name.endswith("key_map"):
            module.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    greedy(model, tokens(1, 4))


def test_adapted_layers_compile_to_one_graph():
    tuned, ids = adapted(tiny_model("gva-drope-16")), tokens(2, 9)
    step = torch.compile(tuned.get_base_model(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(step(ids, use_cache=False).logits, tuned(ids).logits, rtol=0, atol=1e-9)


# ---- trainers ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("published")
    train_bpe(["def f(x):\n    return x\n"] * 9, 300).save(out / "tokenizer")
    model = tiny_model("gva-drope-16", torch.float32, std=0.02, vocab_size=320)
    publish(model, out / "tokenizer", out / "model", "")
    return out / "model"


def test_the_trainer_of_transformers(folder, tmp_path):
    """With an adapter on everything and activations computed anew; its checkpoint is an adapter that loads."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(1, 16).repeat(8, 1).tolist()]
    more = {"use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    recipe = TrainingArguments(
        tmp_path, max_steps=6, per_device_train_batch_size=2, learning_rate=0.02, gradient_checkpointing=True, **more
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(tuned, recipe, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    trainer.save_model(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = tokens(1, 5)
    torch.testing.assert_close(again(ids).logits, tuned.eval()(ids).logits)


TRL = """
import sys
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

folder, out = sys.argv[1:]
rows = Dataset.from_list([{"text": "def f(x): return x"}] * 8)
more = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False, "trust_remote_code": True}
for name, adapter in (("whole", None), ("adapter", LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))):
    recipe = SFTConfig(
        out, max_steps=4, per_device_train_batch_size=2, logging_steps=1, learning_rate=0.01, use_cpu=True, **more
    )
    assert ("gva" in sys.modules) == (adapter is not None)
    trainer = SFTTrainer(model=folder, args=recipe, train_dataset=rows, peft_config=adapter)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert float(losses[-1]) < float(losses[0]), losses
    trainer.save_model(f"{out}/{name}")
"""


def test_trl_on_a_folder_in_a_process_that_never_imported_gva(folder, tmp_path):
    pytest.importorskip("trl", reason="needs TRL: make test")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRL, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert tuned.config.eos_token_id == json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert not torch.equal(tuned.lm_head.weight, AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    assert (tmp_path / "whole" / "modeling_gva.py").is_file()
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
