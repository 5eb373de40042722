"""Writes the tables and plots of the documentation from benchmarks/results/*.csv.

    python benchmarks/table.py

Needs this package. Rows are those of the last run in a table: the same GPU, versions, settings and commit as its last
line. Training rows are shown all, run by run, because a ratio holds within a run only.
"""

from __future__ import annotations

import csv
import pathlib
import statistics

from gva.report.tables import fill

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "decode-efficiency.svg"
PAPER_TOKENS = 30e9
BARS = {"single": 0.85, "medium": 0.92, "large": 0.97}


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def last_run(name: str) -> list[dict[str, str]]:
    """Rows that share run, GPU and commit with the last row."""
    rows = read(name)
    key = [k for k in ("date", "gpu", "torch", "triton", "commit", "read_limit_gb_per_s") if k in rows[0]]
    return [row for row in rows if all(row[k] == rows[-1][k] for k in key)]


def grid(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))


def markdown(header: list[str], lines: list[list[str]], row: dict[str, str], more: str = "") -> str:
    """A table, and what its numbers depend on."""
    parts = [row["gpu"], f"torch {row['torch']}"] + ([f"triton {row['triton']}"] if "triton" in row else [])
    return "\n".join([grid(header, lines), "", ", ".join([*parts, f"commit {row['commit']}"]) + f".{more}"])


def name(row: dict[str, str]) -> str:
    """What distinguishes a row from the plain case."""
    plain = {"S": "1", "page": "64", "layout": "separate", "values": "bf16", "ragged": "False"}
    extra = [f"{k}={row[k]}" for k, value in plain.items() if row[k] != value]
    return ", ".join(extra).replace("ragged=True", "ragged").replace("layout=row", "one row").replace("values=", "")


def table(rows: list[dict[str, str]]) -> str:
    """Markdown."""
    lines = [
        "| case | B x T | H, G, d_h, d_r | MiB | us (p20-p80) | GB/s | of read limit | FA3 GQA us | speed-up | bytes "
        "| efficiency | plan us |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = name(row) or row["suite"]
        lines.append(
            f"| {case} | {row['B']} x {row['T']} | {row['H']}, {row['G']}, {row['d_h']}, {row['d_r']} "
            f"| {int(row['bytes']) / 2**20:.0f} | {row['us']} ({row['us_p20']}-{row['us_p80']}) | {row['gb_per_s']} "
            f"| {row['of_read_limit']} | {row['fa3_us']} {row['fa3_form']} | {row['speedup']} | {row['byte_ratio']} "
            f"| {row['efficiency']} | {row['plan_us']} |"
        )
    first = rows[0]
    lines.append(
        f"\n{first['gpu']}, torch {first['torch']}, triton {first['triton']}, {first['date']}; read limit "
        f"{first['read_limit_gb_per_s']} GB/s."
    )
    return "\n".join(lines)


def plot(rows: list[dict[str, str]]) -> str:
    """Efficiency over cache size, the bars as lines; plain SVG."""
    import math

    points = [r for r in rows if r["suite"] in BARS]
    width, height, left, bottom = 640, 300, 50, 40

    def x(size: float) -> float:
        return left + (math.log2(size) - 1) / 11 * (width - left - 10)

    def y(value: float) -> float:
        return height - bottom - (value - 0.7) / 0.35 * (height - bottom - 10)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for value in (0.7, 0.8, 0.9, 1.0):
        parts.append(
            f'<path d="M{left} {y(value):.1f}H{width - 10}" stroke="#ddd"/>'
            f'<text x="15" y="{y(value) + 4:.1f}">{value}</text>'
        )
    for size in (4, 16, 64, 256, 1024, 2048):
        parts.append(f'<text x="{x(size):.1f}" y="{height - 20}" text-anchor="middle">{size} MiB</text>')
    for low, high, bar in ((2, 64, 0.85), (64, 1024, 0.92), (1024, 4096, 0.97)):
        parts.append(f'<path d="M{x(low):.1f} {y(bar):.1f}H{x(high):.1f}" stroke="#c33" stroke-dasharray="4 3"/>')
    for row in points:
        cx, cy = x(int(row["bytes"]) / 2**20), y(float(row["efficiency"]))
        fill = "#06c" if row["d_h"] == "64" else "#e80"
        parts.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{fill}"><title>{row["B"]} x {row["T"]}</title></circle>'
        )
    parts.append(
        f'<text x="{left}" y="{height - 5}">cache size; blue d_h=64, orange d_h=128; dashed: the bars</text></svg>'
    )
    return "\n".join(parts) + "\n"


def prefill_table() -> str:
    rows = last_run("prefill")
    header = [
        "backend",
        "B x T",
        "H, G, d_h, d_r",
        "GQA us",
        "GVA us",
        "GVA over GQA",
        "building K, repeating V us",
        "GB/s",
    ]
    lines = [
        [
            {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "flash2": "FlashAttention-2"}[row["backend"]],
            f"{row['B']} x {row['T']}",
            f"{row['H']}, {row['G']}, {row['d_h']}, {row['d_r']}",
            *(f"{float(row[k]):.0f}" for k in ("gqa_us", "gva_us")),
            f"{float(row['gva_over_gqa']):.3f}",
            f"{float(row['expand_us']):.0f} (plain torch {float(row['eager_expand_us']):.0f})",
            f"{float(row['expand_gb_per_s']):.0f}",
        ]
        for row in rows
    ]
    return markdown(header, lines, rows[0])


THROUGH = {"dynamic": "`DynamicCache`", "static": "`StaticCache`", "pages": "`PagedGenerator`"}


def cpu_table() -> str:
    """Ratios alone: how fast a processor is, others may measure."""
    rows = sorted(last_run("end_to_end_cpu"), key=lambda row: list(THROUGH).index(row["through"]))
    lines, seen = [], set()
    for row in rows:
        case = row["through"], row["variant"]
        if case in seen:  # gqa takes turns with each of the others
            continue
        seen.add(case)
        numbers = [f"{float(row[key]):.2f}x" for key in ("against_first", "byte_ratio", "times_floor")]
        lines.append([THROUGH[row["through"]], f"`{row['variant']}`", *numbers])
    row, header = rows[0], ["cache", "variant", "tokens/s against GQA", "ratio of bytes", "step over its floor"]
    what = f" Preset {row['preset']}, {row['batch']} x {row['context']}, {row['dtype']}; threads: {row['threads']}."
    return markdown(header, lines, row, what)


def end_to_end_table() -> str:
    rows = last_run("end_to_end")
    header = [
        "batch x context",
        "variant",
        "step ms",
        "tokens/s",
        "against GQA",
        "GB/s of the minimal bytes",
        "cache GiB",
    ]
    header += ["peak GiB"]
    lines = [
        [
            f"{row['batch']} x {row['context']}",
            f"`{row['variant']}`",
            f"{float(row['step_ms']):.2f}",
            f"{float(row['tokens_per_second']):,.0f}",
            f"{float(row['against_first']):.3f}x",
            f"{float(row['gb_per_second_of_floor']):.0f}",
            f"{float(row['cache_gib']):.2f}",
            f"{float(row['peak_gib']):.2f}",
        ]
        for row in rows
    ]
    return markdown(header, lines, rows[0], f" Preset {rows[0]['preset']}, {rows[0]['dtype']}, random weights.")


def capacity_table() -> str:
    rows = last_run("capacity")
    gqa = next(int(row["largest_batch"]) for row in rows if row["variant"] == "gqa")
    header = ["variant", "context", "largest batch", "against GQA", "peak GiB", "of GiB"]
    lines = [
        [
            f"`{row['variant']}`",
            row["context"],
            row["largest_batch"],
            f"{int(row['largest_batch']) / gqa:.3f}x",
            f"{float(row['peak_gib']):.2f}",
            f"{float(row['device_gib']):.2f}",
        ]
        for row in rows
    ]
    return markdown(
        header, lines, rows[0], f" Preset {rows[0]['preset']}, {rows[0]['dtype']}, pages of {rows[0]['page']}."
    )


SERVED = {
    "cache_tokens": "tokens of cache",
    "first_token_ms": "first token, ms",
    "inter_token_ms": "between tokens, ms",
    "output_tokens_per_second": "output tokens/s",
    "mean_first_token_ms": "mean first token, ms",
}
LOAD = ("measure", "requests", "tokens_in", "tokens_out")
SERVED_AT = ("88d8d63", "5e925b8")  # the same package: the second lets the benchmark repeat


def told(values: list[float]) -> str:
    """The median; of several, also how many, the least and the most."""
    if not values:
        return "-"
    middle, least, most = (
        f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({len(values)} runs: {least} to {most})"


def serving_table() -> str:
    """Rows of `SERVED_AT` that share everything but variant and graphs with the last one: their median, and from where
    to where they lie. GVA over GQA, each with the graphs that are best for it; a line whose peer is missing has no
    ratio."""
    rows = [row for row in read("serving") if row["commit"] in SERVED_AT]
    free = {"case", "variant", "graphs", "value", "date", "commit", *LOAD}
    rows = [row for row in rows if all(row[k] == rows[-1][k] for k in row.keys() - free)]
    columns = sorted({(row["variant"], row["graphs"]) for row in rows})
    lines = []
    for case in dict.fromkeys(tuple(row[k] for k in LOAD) for row in rows):
        measure, requests, tokens_in, tokens_out = case
        found: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if tuple(row[k] for k in LOAD) == case:
                found.setdefault((row["variant"], row["graphs"]), []).append(float(row["value"]))
        best = min if measure.endswith("_ms") else max
        gqa, gva = (
            best((statistics.median(values) for (name, _), values in found.items() if name == variant), default=None)
            for variant in ("gqa", "gva-drope-16")
        )
        load = f"{requests} x {tokens_in} / {tokens_out}" if requests != "0" else ""
        shown = [told(found.get(column, [])) for column in columns]
        lines.append([SERVED[measure], load, *shown, f"{gva / gqa:.3f}" if gqa and gva else "-"])
    row = rows[-1]
    engine = (
        f" vLLM {row['vllm']}, preset {row['preset']}, {row['dtype']}, cache {row['kv_cache_dtype']}, block_size "
        f"{row['block_size']}, max_num_seqs {row['max_num_seqs']}, max_num_batched_tokens "
        f"{row['max_num_batched_tokens']}, {row['cache_gib']} GiB."
    )
    titles = [f"`{variant}`, graphs: {graphs}" for variant, graphs in columns]
    row = {**row, "commit": " and ".join(SERVED_AT)}
    return markdown(["", "requests x in / out", *titles, "GVA over GQA"], lines, row, engine)


def mask_table() -> str:
    rows = last_run("train-document-mask")
    header = ["variant", "step ms", "tokens/s", "against the first"]
    lines = [
        [
            f"`{row['variant']}`",
            f"{float(row['bare_ms']):.1f}",
            f"{float(row['tokens_per_second']):,.0f}",
            f"{float(row['against_first']):.3f}x",
        ]
        for row in rows
    ]
    return markdown(header, lines, rows[0], f" Documents of {rows[0]['mean_document']} tokens on average.")


def training_table() -> str:
    """Markdown: speed of each variant, against GQA in the same run, and what the paper's run would cost at it."""
    rows = read("train")
    lines = [
        "| run | variant | parameters | step ms (floor) | tokens/s | MFU | against the run's first "
        "| loop over bare step | GiB | GPU-hours for 30B tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    run = 0
    for row in rows:
        run += float(row["against_first"]) == 1.0  # the first variant of a run is what the others are held against
        hours = PAPER_TOKENS / float(row["loop_tokens_per_second"]) / 3600
        lines.append(
            f"| {run} | `{row['variant']}` | {int(row['parameters']) / 1e6:.1f}M | {float(row['bare_ms']):.1f} "
            f"({float(row['floor_ms']):.1f}) | {float(row['tokens_per_second']):,.0f} | {float(row['mfu']):.1%} "
            f"| {float(row['against_first']):.3f}x | {float(row['loop_over_bare']):.3f}x "
            f"| {float(row['memory_gib']):.1f} | {hours:.1f} |"
        )
    row = rows[0]
    lines.append(
        f"\n{row['gpu']}, torch {row['torch']}, preset {row['preset']}, {row['batch']} x {row['length']} tokens a step."
    )
    return "\n".join(lines)


def prepare_table() -> str:
    rows = last_run("prepare")
    header = ["jsonl", "most memory", "time"]
    lines = [[f"{float(r['mb']):.0f} MB, {r['form']}", f"{r['peak_mb']} MB", f"{r['seconds']} s"] for r in rows]
    return markdown(header, lines, rows[-1])


def checkpoint_table() -> str:
    rows = last_run("checkpoint")
    told = {"write": "a checkpoint is written", "checkpoint_disk": "read from disk", "checkpoint_memory": "from memory",
            "model_disk": "a model is loaded from disk", "model_memory": "from memory"}  # fmt: skip
    header = ["preset", "", "time", "of that, checking"]
    lines = [
        [r["preset"], what, f"{float(r[f'{kind}_s']):.2f} s", f"{float(r[f'{kind}_check']):.1%}"]
        for r in rows
        for kind, what in told.items()
    ]
    more = f" Checkpoints of {rows[-1]['mib']} MiB, models of a third; medians of {rows[-1]['rounds']} rounds."
    return markdown(header, lines, rows[-1], more)


def faults_table() -> str:
    """Jobs are swept one by one, each at a commit of its own."""
    rows, counts = read("faults"), ("kills", "halfway", "twice", "disk_full", "lost")
    header = ["command", "file operations", "kills", "halfway through a write", "in the second try", "full disks",
              "lost", "commit"]  # fmt: skip
    lines = [[r["job"], r["operations"], *(r[name] for name in counts), r["commit"]] for r in rows]
    total = ["all", "", *(str(sum(int(r[name]) for r in rows)) for name in counts), ""]
    made = sorted({f"{r['gpu']}, torch {r['torch']}, gva {r['gva']}" for r in rows})
    return "\n".join([grid(header, [*lines, total]), "", f"{'; '.join(made)}."])


def pages() -> dict[pathlib.Path, str]:
    """Every generated file and what it should hold."""
    decode = last_run("decode")
    tables = {
        "performance": {
            "decode": table(decode),
            "prefill": prefill_table(),
            "end to end": end_to_end_table(),
            "capacity": capacity_table(),
            "without a GPU": cpu_table(),
        },
        "serving": {"serving": serving_table()},
        "training": {"prepare": prepare_table(), "train": training_table(), "document mask": mask_table()},
        "reliability": {"faults": faults_table(), "checkpoint": checkpoint_table()},
    }
    found = {ROOT / "docs" / f"{name}.md": content for name, content in tables.items()}
    return {
        **{page: fill(page.read_text(encoding="utf-8"), content) for page, content in found.items()},
        PLOT: plot(decode),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
