"""The shape of the house, read from the imports themselves, and that an attention is one file: toys that tests add."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

from gva import PagedGenerator, cost, ops
from gva.diagnostics import cache_scalars_per_token_per_layer
from models import tiny_config, tiny_model, tokens
from toys import registered

ROOT = Path(__file__).parents[1] / "src" / "gva"

# What each package, or module beside them, imports of the others. docs/draw.py draws it for docs/architecture.md.
ARROWS = {
    "errors": set(),
    "text": set(),
    "ops": set(),
    "attention": {"ops", "errors"},
    "presets": set(),
    "remote": set(),
    "config": {"attention", "presets", "remote", "errors"},
    "cost": {"attention", "ops", "errors"},
    "caches": {"attention", "ops"},
    "run": set(),
    "weights": {"run"},
    "data": {"run", "errors"},
    "model": {"attention", "caches", "config", "remote", "weights"},
    "convert": {
        "model", "config", "attention", "evaluate", "data", "diagnostics", "weights", "run", "errors",
    },
    "diagnostics": {"attention", "caches"},
    "check": {"model", "config", "cost", "diagnostics"},
    "paged": {"attention", "ops", "errors"},
    "nn": {"attention", "ops", "paged", "presets", "errors"},
    "serve": {"paged", "attention", "ops", "config", "weights", "text", "errors"},
    "evaluate": {"model", "data", "run", "weights", "text", "errors"},
    "train": {
        "evaluate", "model", "config", "cost", "diagnostics", "ops", "remote", "data", "run", "weights", "errors",
    },
    "study": {"train", "model", "paged", "ops", "config", "data", "run", "weights", "errors"},
    "report": {"study", "cost", "run", "text", "errors"},
    "cli": {
        "report", "study", "train", "evaluate", "convert", "serve", "paged", "model", "check", "config", "cost", "data",
        "ops", "run", "text", "errors",
    },
}  # fmt: skip
OUTSIDE = {part: {"transformers", "vllm"} for part in ("attention", "ops", "paged", "nn")}


def imports(file: Path) -> list[str]:
    """Every module or name that a file imports, wherever in it the statement stands."""
    package, found = ["gva", *file.relative_to(ROOT).parts[:-1]], []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def part_of(file: Path) -> str:
    inside = file.relative_to(ROOT).parts
    return inside[0] if len(inside) > 1 else file.stem


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


@pytest.mark.parametrize("part", ARROWS)
def test_arrows_point_one_way(part):
    used = {
        words[1]
        for file in FILES
        if part_of(file) == part
        for words in (name.split(".") for name in imports(file))
        if words[0] == "gva" and len(words) > 1 and words[1] in ARROWS and words[1] != part
    }
    assert used == ARROWS[part], f"{part} imports {sorted(used - ARROWS[part])}, not {sorted(ARROWS[part] - used)}"
    names = {name.split(".")[0] for file in FILES if part_of(file) == part for name in imports(file)}
    assert not names & OUTSIDE.get(part, set())


def test_every_part_has_its_arrows_and_they_make_no_circle():
    assert {part_of(file) for file in FILES} == set(ARROWS)
    left = dict(ARROWS)
    while left:
        free = [part for part, needs in left.items() if not needs & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for part in free:
            del left[part]


@pytest.mark.parametrize("module", ["gva", "gva.cost", "gva.ops", "gva.nn", "gva.attention"])
def test_what_loads_torch_alone(module):
    code = f"import {module}, sys; print(sorted(set(sys.modules) & {{'transformers', 'triton', 'datasets', 'vllm'}}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_public_names_of_ops():
    assert set(ops.__all__) == {
        "DecodePlan", "Pages", "absorb", "append", "expand", "linear_cross_entropy", "linear_distillation",
        "merge_states", "packed_row_bytes", "packed_views", "paged_attention", "paged_decode", "plan_decode",
        "row_views", "row_width",
    }  # fmt: skip
    assert all(hasattr(ops, name) for name in ops.__all__)


def test_files_and_functions_stay_short():
    """Kernels aside, whose length is that of an algorithm."""
    long = []
    for file in [*FILES, *ROOT.rglob("*.cu")]:
        text = file.read_text()
        if text.count("\n") > 500:
            long.append(file.name)
        if file.suffix == ".py" and "kernel" not in file.name and file.parent.name != "triton":
            functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
            long += [f"{file.name}: {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno >= 80]
    assert not long


# ---- an attention in one file ----


@pytest.fixture(params=["toy", "toy-expanded"])
def toy(request):
    with registered(request.param) as name:
        yield {"attention": name, "num_attention_heads": 6, "num_value_groups": 3, "value_head_dim": 24, "rope_dim": 8}


def test_a_toy_is_counted(toy):
    config = tiny_config("gva-drope-16", **toy)
    assert cost.cache_scalars_per_token_per_layer(config) == 3 * 24 + 8
    model = tiny_model("gva-drope-16", **toy)
    assert cost.parameters(config)["total"] == sum(p.numel() for p in model.parameters())
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=9)):
        with torch.no_grad():
            model(tokens(2, 9), past_key_values=cache)
        assert cache_scalars_per_token_per_layer(cache) == 3 * 24 + 8


def test_a_toy_trains(toy):
    model, ids = tiny_model("gva-drope-16", std=0.05, **toy), tokens(2, 17)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@torch.no_grad()
def test_a_toy_generates_on_every_cache(toy):
    model, prompts = tiny_model("gva-drope-16", **toy), [tokens(1, n)[0].tolist() for n in (3, 11, 6)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(7):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        wanted.append(ids[0, len(prompt) :].tolist())
    for prompt, answer in zip(prompts, wanted, strict=True):
        for options in ({}, {"cache_implementation": "static"}):
            got = model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=0, **options)
            assert got[0, len(prompt) :].tolist() == answer
    for layout in ("rows", "separate"):
        assert PagedGenerator(model, 3, 24, page=4, layout=layout, prefill_tokens=8).generate(prompts, 7) == wanted


def test_a_toy_without_an_absorbed_form_says_so(toy):
    model = tiny_model("gva-drope-16", **toy)
    if model.config.absorbs:
        both = [model(tokens(1, 4), attention_form=form, use_cache=False).logits for form in ("absorbed", "expanded")]
        assert both[0].shape == both[1].shape
    else:
        with pytest.raises(ValueError, match=r"attention='toy-expanded' .* its class declares no absorbed form"):
            model(tokens(1, 4), attention_form="absorbed")
