"""What was asked for beside what was measured, and the findings in a sentence each, from benchmarks/results/*.csv."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from measured import OURS, Row, decoded, last_run, read, served_ratios, twin

INFINITE = float("inf")
ASKED_HEADS = ("16/4/64", "32/8/128", "16/1/128", "8/2/64")  # H/G/d_h for which rows were asked, each with four d_r
NOT_MEASURED = "not measured"


@dataclass
class Asked:
    what: str
    bar: float | str  # words where nothing was measured
    values: Sequence[float] = field(default_factory=list)
    most: bool = False  # the bar is the most that was allowed, else the least
    digits: int = 3
    unit: str = ""
    of: str = ""  # how much of what was asked was measured

    @property
    def met(self) -> int:
        assert not isinstance(self.bar, str)
        return sum(value <= self.bar if self.most else value >= self.bar for value in self.values)

    def verdict(self) -> str:
        if not self.values:
            return NOT_MEASURED
        all_or_none = self.met in (0, len(self.values))
        word = ("met" if self.met else "missed") if all_or_none else f"met in {self.met} of {len(self.values)}"
        return f"{word}, on {self.of}" if self.of else word

    def cells(self) -> list[str]:
        bar = self.bar if isinstance(self.bar, str) else f"{'at most ' * self.most}{self.bar:g}{self.unit}"
        measured = span(self.values, self.digits, self.unit) if self.values else ""
        return [self.what, bar, measured, self.verdict()]


def span(values: Iterable[float], digits: int = 2, unit: str = "x") -> str:
    ordered = sorted(values)
    least, most = (f"{value:.{digits}f}{unit}" for value in (ordered[0], ordered[-1]))
    return least if least == most else f"{least} to {most}"


def table(lines: Sequence[Asked]) -> str:
    """What was measured, and after it the rest."""
    rows = [["asked", "bar", "measured", "verdict"], ["---"] * 4, *(line.cells() for line in lines if line.values)]
    parts = [tally(lines), "\n".join("| " + " | ".join(row) + " |" for row in rows)]
    rest = [f"- {what}: {bar}" for what, bar, *_ in (line.cells() for line in lines if not line.values)]
    return "\n\n".join([*parts, "Asked and not measured yet:", "\n".join(rest)] if rest else parts)


def tally(lines: Sequence[Asked]) -> str:
    verdicts = [line.verdict() for line in lines]
    counts = {"met": verdicts.count("met"), "met in part": 0, "missed": 0, NOT_MEASURED: verdicts.count(NOT_MEASURED)}
    counts["missed"] = sum(verdict.startswith("missed") for verdict in verdicts)
    counts["met in part"] = len(lines) - sum(counts.values())
    *first, last = [f"{count} {'was' if count == 1 else 'were'} {word}" for word, count in counts.items() if count]
    return f"Of {len(lines)} lines, {', '.join(first)} and {last}."


# ---- decoding ----


def efficiencies(rows: Iterable[Row]) -> list[float]:
    return [float(row["efficiency"]) for row in rows]


def of_rows(rows: list[Row], what: str, bar: float, **where: Any) -> Asked:
    """Rows, as vLLM has them, of the shapes that were asked."""
    found = decoded(rows, layout="row", **where)
    found = [row for row in found if f"{row['H']}/{row['G']}/{row['d_h']}" in ASKED_HEADS]
    shapes = {tuple(row[k] for k in ("H", "G", "d_h", "d_r")) for row in found}
    every = 4 * len(ASKED_HEADS)
    return Asked(what, bar, efficiencies(found), of=f"{len(shapes)} of {every} shapes" if len(shapes) < every else "")


def times_over(rows: list[Row], found: Iterable[Row], **plain: str) -> list[float]:
    """The time of rows over that of the same shape with other fields."""
    pairs = [(row, twin(rows, row, **plain)) for row in found]
    return [float(row["us"]) / float(other["us"]) for row, other in pairs if other]


def per_byte(rows: list[Row], layout: str) -> list[float]:
    """The speed of ragged lengths over that of uniform ones."""
    ragged = decoded(rows, layout=layout, ragged="True")
    pairs = [(row, twin(rows, row, ragged="False")) for row in ragged]
    return [float(row["gb_per_s"]) / float(other["gb_per_s"]) for row, other in pairs if other]


def fp8_over_bf16(rows: list[Row], d_h: str) -> list[float]:
    """The share of the bytes' ratio by which fp8 is faster."""
    pairs = [(row, twin(rows, row, values="bf16")) for row in decoded(rows, values="fp8", d_h=d_h)]
    return [
        float(other["us"]) / float(row["us"]) / (int(other["bytes"]) / int(row["bytes"]))
        for row, other in pairs
        if other
    ]


def drafts(rows: list[Row], heads: int, tokens: str) -> list[float]:
    found = [row for row in decoded(rows, S=tokens) if int(row["H"]) == heads * int(row["G"])]
    return times_over(rows, found, S="1")


def decoding(rows: list[Row]) -> list[Asked]:
    return [*in_rows(rows), *on_pages(rows), *over_plain(rows)]


def in_rows(rows: list[Row]) -> list[Asked]:
    return [
        of_rows(rows, "efficiency in rows, 1 GiB and more", 0.96, mib=(1024, INFINITE), batch=True),
        of_rows(rows, "efficiency in rows, 256 MiB to 1 GiB", 0.93, mib=(256, 1024), batch=True),
        of_rows(rows, "efficiency in rows, 64 to 256 MiB", 0.88, mib=(64, 256), batch=True),
        of_rows(rows, "efficiency in rows, one sequence of 8k", 0.80, batch=False, T="8192"),
        of_rows(rows, "efficiency in rows, one sequence of 32k", 0.85, batch=False, T="32768"),
        of_rows(rows, "efficiency in rows, one sequence of 64k", 0.85, batch=False, T="65536"),
        Asked("ragged over uniform lengths, by bytes: rows", 0.92, per_byte(rows, "row")),
    ]


def on_pages(rows: list[Row]) -> list[Asked]:
    large, medium, single = (
        efficiencies(decoded(rows, mib, batch, layout="separate"))
        for mib, batch in (((1024, INFINITE), True), ((64, 1024), True), ((0, INFINITE), False))
    )
    of_16 = times_over(rows, decoded(rows, page="16"), page="64")
    return [
        Asked("efficiency on separate pages, 1 GiB and more", 0.97, large),
        Asked("efficiency on separate pages, 64 MiB to 1 GiB", 0.92, medium),
        Asked("efficiency on separate pages, one sequence", 0.85, single),
        Asked("ragged over uniform lengths, by bytes: separate pages", 0.9, per_byte(rows, "separate")),
        Asked("pages of 16 over pages of 64, time", 1.05, of_16, most=True, unit="x"),
    ]


def over_plain(rows: list[Row]) -> list[Asked]:
    """Drafts, fp8, the plan, and one group."""
    bars = ((4, "4", 1.08), (4, "8", 1.2), (8, "4", 1.12), (8, "8", 1.4))
    worst = max(rows, key=lambda row: float(row["plan_us"]))
    plan = f"a plan of at most 1024 sequences, here {worst['B']}"
    return [
        *(
            Asked(
                f"{tokens} new tokens over 1, R = {heads}, time", bar, drafts(rows, heads, tokens), most=True, unit="x"
            )
            for heads, tokens, bar in bars
        ),
        Asked("fp8 over bfloat16, by bytes, d_h 64", 0.9, fp8_over_bf16(rows, "64")),
        Asked("fp8 over bfloat16, by bytes, d_h 128", 0.92, fp8_over_bf16(rows, "128")),
        Asked("fp8 over FlashAttention-3 in fp8, by bytes", 0.92, efficiencies(decoded(rows, values="fp8"))),
        Asked(plan, 5, [float(worst["plan_us"])], most=True, digits=1, unit=" us"),
        Asked("`gva-one-group`, now `gva`, share of its own ratio of bytes", "0.97"),
        Asked("one group as wide as a latent, over FlashMLA, H = 16 / 64 / 128", "1x / 0.85x / 0.7x"),
    ]


# ---- whole models ----


def whole(batch: str, context: str) -> list[float]:
    rows = [row for row in last_run("end_to_end") if (row["batch"], row["context"]) == (batch, context)]
    return [float(row["against_first"]) for row in rows if row["variant"] == OURS]


def largest_batch() -> list[float]:
    found = {row["variant"]: int(row["largest_batch"]) for row in last_run("capacity")}
    return [found[OURS] / found["gqa"]]


def prefill() -> list[float]:
    rows = [row for row in last_run("prefill") if int(row["T"]) >= 8192 and row["backend"] in ("fa3", "cudnn")]
    return [float(row["gva_over_gqa"]) for row in rows]


def trained(field: str, variant: str) -> list[float]:
    return [float(row[field]) for row in read("train") if row["variant"] == variant]


def training() -> list[Asked]:
    return [
        Asked("a training step of GVA over GQA's, speed", 0.975, trained("against_first", OURS), unit="x"),
        Asked("MFU of GQA's training step", 48, [100 * x for x in trained("mfu", "gqa")], digits=1, unit="%"),
    ]


def without_gpu(through: str) -> list[Row]:
    rows = last_run("end_to_end_cpu")
    return [row for row in rows if (row["through"], row["variant"]) == (through, OURS) and row["context"] == "4096"]


def models() -> list[Asked]:
    of_bytes = [float(row["against_first"]) / float(row["byte_ratio"]) for row in without_gpu("static")]
    dynamic = [float(row["against_first"]) for row in without_gpu("dynamic")]
    floors = [float(row["times_floor"]) for row in without_gpu("pages")]
    return [
        Asked("prefill from 8192 tokens, time over GQA's", 1.1, prefill(), most=True, unit="x"),
        Asked("tokens/s over GQA's, 256 x 8192", 1.6, whole("256", "8192"), unit="x"),
        Asked("tokens/s over GQA's, 64 x 32768", 1.7, whole("64", "32768"), unit="x"),
        Asked("largest batch at 32768 over GQA's", 1.85, largest_batch(), unit="x"),
        *training(),
        Asked("`generate`, static, compiled, 16 x 8192 / 64 x 8192", "1.15x / 1.3x"),
        Asked("`generate`, dynamic, 16 x 8192 / 64 x 32768", "0.95x / 1.4x"),
        Asked("CPU, `DynamicCache`, tokens/s over GQA's", 1.25, dynamic, unit="x"),
        Asked("CPU, `StaticCache`, share of the ratio of bytes", 0.85, of_bytes),
        Asked("CPU, `PagedGenerator`, step over its floor", 5, floors, most=True, unit="x"),
    ]


# ---- served ----


def over_loads(measure: str) -> list[float]:
    """The median ratio of each load."""
    return [statistics.median(served_ratios(measure, out)) for out in ("2048", "1024", "256")]


def serving() -> list[Asked]:
    lower = [1 / ratio for ratio in served_ratios("inter_token_ms", "72")]
    capacity = served_ratios("cache_tokens", "0")
    first, mean_first = served_ratios("first_token_ms", "1"), over_loads("mean_first_token_ms")
    return [
        Asked("350M: tokens of cache in the same memory", 1.85, capacity, unit="x"),
        Asked("350M: tokens/s, 256 x 8192 / 2048", 1.65, served_ratios("output_tokens_per_second", "2048"), unit="x"),
        Asked("350M: tokens/s, 256 x 4096 / 1024", 1.3, served_ratios("output_tokens_per_second", "1024"), unit="x"),
        Asked("350M: tokens/s, 256 x 4096 / 256", 1.1, served_ratios("output_tokens_per_second", "256"), unit="x"),
        Asked("350M: between tokens, GQA's time over GVA's, 512 x 8192", 1.55, lower, unit="x"),
        Asked("350M: first token of one prompt of 8192, time", 1.1, first, most=True, unit="x"),
        Asked("350M: mean first token over a batch, time", 1.1, mean_first, most=True, unit="x"),
        Asked("8B: tokens/s, 64 x 8192 / 1024, and / 4096", "1.22x, 1.4x"),
        Asked("8B: tokens/s, 16 x 32768 / 512, and / 2048", "1.08x, 1.25x"),
        Asked("8B: between tokens, GQA's time over GVA's, 64 x 8192", "1.45x"),
        Asked("8B: one request of 32768 / 256, tokens/s and first token", "1x and at most 1.05x"),
        Asked("8B: tokens of cache in the same memory", "1.9x"),
        Asked("through the OpenAI server, with vLLM's client", "reported"),
        Asked("fp8 caches, 20,000 tokens of a trained model", "judged by tokens"),
        Asked("8 minutes of mixed load on a GPU server", "nothing left behind"),
    ]


# ---- the findings ----


def found_fast(rows: list[Row]) -> str:
    large = decoded(rows, (1024, INFINITE), True)
    faster, bytes_allow = (span(float(row[name]) for row in large) for name in ("speedup", "byte_ratio"))
    one = [float(row["speedup"]) for row in decoded(rows, batch=False)]
    wholes = whole("256", "8192") + whole("64", "32768")
    served = over_loads("output_tokens_per_second")
    cpu = [float(row["against_first"]) for through in ("dynamic", "static", "pages") for row in without_gpu(through)]
    lines = {
        "Attention, 1 to 2 GiB of cache": f"{faster} FlashAttention-3's speed on GQA; the bytes allow {bytes_allow}",
        "Attention, one sequence": f"{span(one)}; a few microseconds besides reading weigh more",
        "A whole 350M model": f"{span(wholes)} the tokens/s of GQA",
        "Largest batch at 32768 tokens": f"{span(largest_batch())}, tried until memory ran out",
        "In vLLM": f"{span(served)} the tokens/s, the more the longer the answers ([serving](serving.md))",
        "Prefill from 8192 tokens": f"attention takes {span(prefill())} of GQA's time",
        "Training": f"{span(trained('against_first', OURS), 3)} of GQA's speed ([training speed](training-speed.md))",
        "Without a GPU": f"{span(cpu)} the tokens/s, by the kind of cache "
        "([the table](performance-tables.md#without-a-gpu))",
    }
    return "\n".join(f"- **{what}:** {words}." for what, words in lines.items())


def found_served() -> str:
    speed, cache = span(over_loads("output_tokens_per_second")), span(served_ratios("cache_tokens", "0"))
    return "\n".join(
        [
            f"Unmodified vLLM serves our checkpoints. On an H200 a 350M GVA model gives {speed} the tokens/s of GQA in",
            f"the same engine, the more the longer the answers, and {cache} the tokens of cache.",
        ]
    )
