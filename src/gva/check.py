"""What `gva check` runs: every variant at a toy size, checked, generating, its real cache measured."""

import time

import torch
from transformers import DynamicCache, StaticCache
from transformers.utils import logging

from gva import cost
from gva.config import VARIANTS, GvaConfig
from gva.diagnostics import cache_scalars_per_token_per_layer
from gva.model import GvaForCausalLM

PROMPT, NEW_TOKENS, SEED = 48, 16, 0
TOLERANCE = 1e-10  # both forms in float64


def run() -> int:
    logging.set_verbosity_error()
    print("Grouped Value Attention: one toy model per variant (random weights, float64, seed 0)\n", flush=True)
    rows, good = [], True
    for number, variant in enumerate(VARIANTS, 1):
        start = time.perf_counter()
        row = examine(variant)
        rows.append(row)
        good &= row["agrees"] and row["measured"] == row["counted"] and row["static"] == row["counted"]
        seconds = time.perf_counter() - start
        print(
            f"[{number:2d}/{len(VARIANTS)}] {variant:19s} {row['check']:46s} {row['tokens']}  {seconds:4.1f} s",
            flush=True,
        )
    print("\nCache, in scalars per token and layer, counted on the tensors of transformers' own cache objects:\n")
    full = next(row["measured"] for row in rows if row["variant"] == "gqa")
    print(f"{'variant':19s} {'DynamicCache':>12s} {'StaticCache':>12s} {'gva.cost':>9s} {'against GQA':>12s}")
    for row in rows:
        saved = row["measured"] / full - 1
        print(f"{row['variant']:19s} {row['measured']:12g} {row['static']:12g} {row['counted']:9d} {saved:+12.1%}")
    print(
        "\nThe same at the paper's size, and what it saves: gva cost --preset paper-350m --context 32768 --memory 80GiB"
    )
    if not good:
        print("\nFAILED: a check above did not hold.")
    return 0 if good else 1


@torch.no_grad()
def examine(variant: str) -> dict:
    """Check one variant's forms and caches against a forward pass without either; measure its caches."""
    torch.manual_seed(SEED)
    config = GvaConfig.preset("demo", variant=variant)
    model = GvaForCausalLM(config).double().eval()
    prompt = torch.randint(config.vocab_size, (2, PROMPT))
    expanded = model(prompt, use_cache=False, attention_form="expanded").logits
    if config.absorbs:
        error = (model(prompt, use_cache=False, attention_form="absorbed").logits - expanded).abs().max().item()
        check = f"absorbed = expanded to {error:.0e},"
    else:
        error, check = 0.0, "no absorption,"
    caches = {
        "measured": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=PROMPT + NEW_TOKENS),
    }
    for cache in caches.values():
        model(prompt[:, :-1], past_key_values=cache)
        step = model(prompt[:, -1:], past_key_values=cache).logits
        error = max(error, (step - expanded[:, -1:]).abs().max().item())
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True, pad_token_id=0)
    return {
        "variant": variant,
        "check": f"{check} decode = prefill to {error:.0e}",
        "agrees": error < TOLERANCE,
        "tokens": " ".join(str(t) for t in tokens[0, PROMPT : PROMPT + 4].tolist()) + " ...",
        "counted": cost.cache_scalars_per_token_per_layer(config),
        **{name: cache_scalars_per_token_per_layer(cache) for name, cache in caches.items()},
    }
