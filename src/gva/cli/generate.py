"""`gva generate`: continue prompts."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue prompts with a trained model, on the paged cache")
    generate.add_argument("checkpoint", type=Path, help="a HuggingFace folder with its tokenizer, such as RUN/model")
    generate.add_argument("--prompt", action="append", help="may be given several times; else lines of standard input")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--batch", type=int, default=8, help="sequences at a time")
    generate.add_argument("--fa3", help="FlashAttention-3's shared object, for GQA; else that of an installed vLLM")
    generate.add_argument("--device", choices=["cpu", "cuda"])
    generate.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    generate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from gva.data.tokenizer import load_tokenizer
    from gva.model import GvaForCausalLM
    from gva.ops import flash
    from gva.paged.generator import PagedGenerator

    tokenizer = load_tokenizer(arguments.checkpoint)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else "auto"
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        flash.load(arguments.fa3)
    model = GvaForCausalLM.from_pretrained(arguments.checkpoint, dtype=dtype).to(device).eval()
    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    # An empty prompt begins a document, as the end of the one before did in training.
    prompts = [tokenizer.tokenizer.encode(text, add_special_tokens=False).ids or [tokenizer.end] for text in texts]
    torch.manual_seed(arguments.seed)
    longest = max(map(len, prompts), default=1) + arguments.max_new_tokens
    batch = min(arguments.batch, max(1, len(prompts)))
    generator = PagedGenerator(model, batch, longest, temperature=arguments.temperature)
    for text, tokens in zip(texts, generator.generate(prompts, arguments.max_new_tokens, tokenizer.end), strict=True):
        print(text + tokenizer.tokenizer.decode(tokens), flush=True)
    return 0
