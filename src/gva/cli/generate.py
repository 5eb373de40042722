"""`gva generate`: continue prompts."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue prompts with a trained model, on the paged cache")
    generate.add_argument("checkpoint", type=Path, help="a model folder, a run, or RUN/checkpoints/step-...")
    generate.add_argument("--prompt", action="append", help="may be given several times; else lines of standard input")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    generate.add_argument("--top-k", type=int, help="draw among the k likeliest tokens (needs --temperature)")
    generate.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that together have this")
    generate.add_argument("--seed", type=int, default=0, help="the same, and the same place of a prompt: the same text")
    generate.add_argument("--ignore-end", action="store_true", help="go on past the model's end token")
    generate.add_argument("--batch", type=int, default=8, help="sequences at a time")
    generate.add_argument("--tokenizer", type=Path, help="where the checkpoint has none")
    generate.add_argument("--fa3", help="FlashAttention-3's shared object, for GQA; else that of an installed vLLM")
    generate.add_argument("--device", choices=["cpu", "cuda"])
    generate.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    generate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from gva.config import NOT_OURS
    from gva.errors import check
    from gva.evaluate.loading import find, load_model, load_tokenizer_of
    from gva.model import GvaForCausalLM
    from gva.ops import flash
    from gva.paged.generator import PagedGenerator
    from gva.paged.text import encoded
    from gva.text import printable
    from gva.train.zclip import total_norm

    place = find(arguments.checkpoint)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        flash.load(arguments.fa3)
    model = load_model(place, getattr(torch, arguments.dtype) if arguments.dtype else None, device)
    check(isinstance(model, GvaForCausalLM), "model_type", model.config.model_type, NOT_OURS)
    if not total_norm(parameter.detach() for parameter in model.parameters()).isfinite():
        raise ArithmeticError(f"{place.weights}: weights that are not numbers; train again, or give another checkpoint")
    tokenizer = load_tokenizer_of(place, model.config.vocab_size, arguments.tokenizer)
    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    longest, new = max((len(encoded(tokenizer, text)) for text in texts), default=1), arguments.max_new_tokens
    fits = longest + new <= (limit := model.config.max_position_embeddings)
    check(fits, "--max-new-tokens", new, f"with a prompt of {longest} beyond the model's context of {limit} tokens")
    generator = PagedGenerator(
        model, min(arguments.batch, max(1, len(texts))), longest + new, tokenizer=tokenizer, seed=arguments.seed,
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
    )  # fmt: skip
    end = () if arguments.ignore_end else None
    for text, said in zip(texts, generator.generate(texts, new, end), strict=True):
        print(text + (printable(said) if sys.stdout.isatty() else said), flush=True)
    return 0
