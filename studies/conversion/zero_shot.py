"""What a conversion costs before any healing, on a real checkpoint, and whether it came in unharmed.

    python studies/conversion/zero_shot.py SmolLM2.gguf --calibrate TEXT --held-out TEXT --models FOLDER --csv CSV

Imports the checkpoint, compares it with transformers' own model of it (greedy tokens of 20 prompts, loss), converts it
to each target that FOLDER does not have yet, and appends a line for each loss on held-out text to the CSV: what is
there of this text is not run again. Calibration is read once for all targets.

Expected, of SmolLM2-135M-Instruct, in nats above the source at 512 tokens: 0.06 at 256 scalars, 0.14 at 208, the
source's groups far behind (their slice is 16), and fewer groups by their mean of no use without training.
"""

import argparse
import csv
import hashlib
import math
import shutil
import statistics
import sys
import time
from datetime import date
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gva import GvaForCausalLM
from gva.convert.converter import MOMENTS
from gva.convert.importer import import_checkpoint
from gva.convert.job import convert
from gva.convert.moments import gather
from gva.convert.text import read_text
from gva.data.documents import read_documents
from gva.data.tokenizer import load_tokenizer
from gva.evaluate.scoring import model_losses
from gva.run.folder import commit

TARGETS = [("gva", 208), ("gva", 256), ("gqa", 128), ("gva-own-groups", 208)]


def held_out(paths: list[Path], skip: int, folder: Path, length: int, tokens: int) -> torch.Tensor:
    """Sequences [N, length] of documents one after another, but for the first `skip` of them."""
    tokenizer = load_tokenizer(folder)
    found: list[int] = []
    for text in islice((text for path in paths for text in read_documents(path)), skip, None):
        found += tokenizer.encode([text])[0]
        if len(found) >= tokens + length:
            break
    whole = min(len(found) // length, math.ceil(tokens / (length - 1)))
    return torch.tensor(found[: whole * length]).view(whole, length)


def fingerprint(sequences: torch.Tensor) -> str:
    return hashlib.sha256(sequences.numpy().tobytes()).hexdigest()[:12]


@torch.no_grad()
def losses(model: torch.nn.Module, sequences: torch.Tensor, told: str, precision: str = "fp32") -> list[float]:
    """The mean of each sequence."""
    of, found = model_losses(model), []
    for part in sequences.split(max(1, 4096 // sequences.shape[1])):
        part = part.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
            found += of(part[:, :-1], part[:, 1:]).double().mean(1).tolist()
        print(f"\r{told}: {len(found)} of {len(sequences)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def check_import(checkpoint: Path, ours: GvaForCausalLM, sequences: torch.Tensor) -> dict[str, object]:
    """Against transformers' own class: prompts of 64 tokens that go on alike for 32, and the loss of the same text."""
    where = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    folder = checkpoint.parent if where else checkpoint
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).to(ours.device).eval()
    prompts = sequences[:20, :64].to(ours.device)
    how = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    told = [model.generate(prompts, attention_mask=torch.ones_like(prompts), **how) for model in (ours, theirs)]
    means = [losses(model, sequences[:16], "import") for model in (ours, theirs)]
    apart = [a - b for a, b in zip(*means, strict=True)]
    row = {"to": "import", "cache": ours.config.row.scalars, "length": sequences.shape[1]}
    row |= {"tokens": sequences[:16, 1:].numel(), "loss": statistics.mean(means[0]), "above": statistics.mean(apart)}
    return {
        **row,
        "error": 0,
        "alike": (told[0] == told[1]).all(1).sum().item(),
        "precision": "fp32",
        "slices": "",
        "seconds": 0,
    }


def append(path: Path, row: dict[str, object]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def there(path: Path) -> set[tuple[str, ...]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(r["to"], r["cache"], r["length"], r["text"], r["precision"]) for r in csv.DictReader(file)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--calibrate", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("--skip", type=int, default=0, help="documents of the held-out text that were looked at before")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000, help="held out")
    parser.add_argument("--calibration", type=int, default=100_000)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of the losses; bf16 is autocast")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--only", nargs="+", help="targets, as gva:208")
    return parser.parse_args()


def converted(
    asked: argparse.Namespace, source: Path, moments: Path, to: str, cache: int
) -> tuple[GvaForCausalLM, int]:
    """And the seconds of processor time that it took, calibration not among them."""
    out, begun = asked.models / f"{to}-{cache}", time.process_time()
    if not out.exists():
        beside = out.with_name(f".{out.name}.converting")
        beside.mkdir(exist_ok=True)
        shutil.copy(moments, beside / MOMENTS)
        convert(source, out, to, str(cache), asked.calibrate, asked.held_out, asked.calibration, 512, 16_384)
    model = GvaForCausalLM.from_pretrained(out, dtype=torch.float32)
    return model.eval().requires_grad_(False), round(time.process_time() - begun)


def main() -> None:
    asked = parse()
    asked.models.mkdir(parents=True, exist_ok=True)
    source = asked.models / "source"
    if not source.exists():
        import_checkpoint(asked.checkpoint, source)
    texts = {length: held_out(asked.held_out, asked.skip, source, length, asked.tokens) for length in asked.lengths}
    first = texts[asked.lengths[0]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GvaForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval().requires_grad_(False)
    made = {
        "text": fingerprint(first),
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }
    if ("import", "384", str(first.shape[1]), made["text"], "fp32") not in there(asked.csv):
        append(asked.csv, {**check_import(asked.checkpoint, model, first), **made})
    calibration, _ = read_text(asked.calibrate, asked.held_out, source, 512, asked.calibration)
    begun = time.process_time()
    moments = asked.models / f"moments-{fingerprint(calibration)}.safetensors"  # of another text they are others
    gather(model, calibration, moments)
    print(f"calibration: {time.process_time() - begun:.0f} s of processor time", file=sys.stderr)
    found = {length: losses(model, text, f"source, {length}", asked.precision) for length, text in texts.items()}
    for to, cache in TARGETS:
        if asked.only and f"{to}:{cache}" not in asked.only:
            continue
        made_of_it, seconds = converted(asked, source, moments, to, cache)
        layers = made_of_it.config.layer_configs
        slices = sorted({layer.rope_dim for layer in layers}) if to.startswith("gva") else []
        for length, text in texts.items():
            if (to, str(cache), str(length), made["text"], asked.precision) in there(asked.csv):
                continue
            ours = losses(made_of_it.to(device), text, f"{to} {cache}, {length}", asked.precision)
            apart = [a - b for a, b in zip(ours, found[length], strict=True)]
            row = {"to": to, "cache": cache, "length": length, "tokens": text[:, 1:].numel()}
            row |= {"loss": statistics.mean(ours), "above": statistics.mean(apart)}
            row |= {"error": statistics.stdev(apart) / math.sqrt(len(apart)), "alike": ""}
            row |= {"precision": asked.precision, "slices": " ".join(map(str, slices)), "seconds": seconds}
            append(asked.csv, {**row, **made})


if __name__ == "__main__":
    main()
