"""Writes the tables and plots of the documentation from benchmarks/results/*.csv.

    python benchmarks/table.py

Needs this package. Rows are those of the last run in a table: the same GPU, versions, settings and commit as its last
line. Training rows are shown all, run by run, because a ratio holds within a run only.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

from gva.report.tables import fill

ROOT = pathlib.Path(__file__).parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import asked  # noqa: E402
import plots  # noqa: E402
from measured import OURS, RESULTS, SERVED_AT, SERVED_LATER, best_median, last_run, read, served  # noqa: E402

PAPER_TOKENS = 30e9


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
    return ", ".join(extra).replace("ragged=True", "ragged").replace("layout=row", "rows").replace("values=", "")


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
    """Ratios alone: how fast a processor is, others may measure. Medians of the runs, and between what they lay."""
    cells: dict[tuple[str, str], dict[tuple[str, str], list[dict[str, str]]]] = {}
    rows = last_run("end_to_end_cpu")
    rows = [row for row in rows if row["clock"] == rows[-1]["clock"]]
    for row in rows:
        shape = row["preset"], f"{row['batch']} x {row['context']}"
        cells.setdefault((row["through"], row["variant"]), {}).setdefault(shape, []).append(row)
    shapes = list(dict.fromkeys(shape for found in cells.values() for shape in found))
    header = [
        "cache",
        "variant",
        *(f"`{preset}`, {size}" for preset, size in shapes),
        "ratio of bytes",
        "over its floor",
    ]
    lines = []
    for (through, variant), found in sorted(cells.items(), key=lambda item: list(THROUGH).index(item[0][0])):
        of_first = found[shapes[0]]
        ratios = [spread(found.get(shape, []), "against_first") for shape in shapes]
        if variant == "gqa":
            ratios = ["1"] * len(shapes)
        numbers = [f"{float(of_first[0]['byte_ratio']):.2f}", spread(of_first, "times_floor")]
        lines.append([THROUGH[through], f"`{variant}`", *ratios, *numbers])
    how = ", ".join(f"{key}: {rows[0][key]}" for key in ("threads", "clock"))
    what = f" {rows[0]['dtype']}, {how}; the last two columns are of the first shape."
    return markdown(header, lines, rows[0], what)


def spread(rows: list[dict[str, str]], key: str) -> str:
    numbers = sorted(float(row[key]) for row in rows)
    if len(numbers) < 2:
        return "".join(f"{number:.2f}" for number in numbers)
    return f"{statistics.median(numbers):.2f} ({numbers[0]:.2f}-{numbers[-1]:.2f})"


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


def told(values: list[float]) -> str:
    """The median; of several, also how many, the least and the most."""
    if not values:
        return "-"
    middle, least, most = (
        f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({len(values)} runs: {least} to {most})"


def serving_table(commits: tuple[str, ...]) -> str:
    """Medians, and from where to where they lie. GVA over GQA, each with the graphs that are best for it; a line whose
    peer is missing has no ratio."""
    rows, loads = served(commits)
    columns = sorted({(row["variant"], row["graphs"]) for row in rows})
    lines = []
    for load, runs in loads.items():
        measure, requests, tokens_in, tokens_out = load
        gqa, gva = (best_median(measure, runs, variant) for variant in ("gqa", OURS))
        asked_for = f"{requests} x {tokens_in} / {tokens_out}" if requests != "0" else ""
        shown = [told(runs.get(column, [])) for column in columns]
        lines.append([SERVED[measure], asked_for, *shown, f"{gva / gqa:.3f}" if gqa and gva else "-"])
    row = rows[-1]
    engine = (
        f" vLLM {row['vllm']}, preset {row['preset']}, {row['dtype']}, cache {row['kv_cache_dtype']}, block_size "
        f"{row['block_size']}, max_num_seqs {row['max_num_seqs']}, max_num_batched_tokens "
        f"{row['max_num_batched_tokens']}, {row['cache_gib']} GiB."
    )
    titles = [f"`{variant}`, graphs: {graphs}" for variant, graphs in columns]
    return markdown(
        ["", "requests x in / out", *titles, "GVA over GQA"], lines, {**row, "commit": " and ".join(commits)}, engine
    )


def fp8_table() -> str:
    rows = last_run("fp8-error")
    header = ["d_h", "deviation of scores", "error of values", "error of the output"]
    lines = [
        [r["d_h"], f"{float(r['spread']):g}", f"{float(r['value_error']):.1%}", f"{float(r['output_error']):.1%}"]
        for r in rows
    ]
    return markdown(header, lines, rows[-1], f" Normal values, {rows[-1]['T']} tokens.")


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


def power_table() -> str:
    """Samples of `nvidia-smi` beside a training run."""
    lines = (RESULTS / "train-power.txt").read_text(encoding="utf-8").splitlines()
    samples = [line.split(", ") for line in lines if not line.startswith("#")]
    found = [(float(clock.split()[0]), float(watts.split()[0]), cap == "Active") for clock, watts, cap in samples]
    table = []
    for low, high, words in ((600, 1000, "above 600 W"), (300, 600, "300 to 600 W"), (0, 300, "below 300 W")):
        clocks, watts, caps = zip(*(sample for sample in found if low < sample[1] <= high), strict=True)
        middle = [f"{statistics.median(watts):.0f} W", f"{statistics.median(clocks):.0f} MHz"]
        table.append([words, str(len(caps)), *middle, f"{sum(caps)} of {len(caps)}"])
    return grid(["power", "samples", "median", "median clock", "power cap active"], table)


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


def tables() -> dict[str, dict[str, str]]:
    """What each page of docs/ has between its markers."""
    decode = last_run("decode")
    return {
        "performance": {
            "found": asked.found_fast(decode),
            "asked": asked.table(asked.models() + asked.decoding(decode)),
        },
        "performance-tables": {
            "decode": table(decode),
            "prefill": prefill_table(),
            "end to end": end_to_end_table(),
            "capacity": capacity_table(),
            "without a GPU": cpu_table(),
        },
        "data": {"prepare": prepare_table()},
        "kernel-design": {"fp8 error": fp8_table()},
        "serving": {"found": asked.found_served(), "asked": asked.table(asked.serving())},
        "serving-tables": {"serving": serving_table(SERVED_AT), "serving later": serving_table(SERVED_LATER)},
        "training-speed": {
            "asked": asked.table(asked.training()),
            "train": training_table(),
            "power": power_table(),
            "document mask": mask_table(),
        },
        "reliability": {"faults": faults_table(), "checkpoint": checkpoint_table()},
    }


def pages() -> dict[pathlib.Path, str]:
    """Every generated file and what it should hold."""
    docs = ROOT / "docs"
    found = {docs / f"{name}.md": content for name, content in tables().items()}
    return {
        **{page: fill(page.read_text(encoding="utf-8"), content) for page, content in found.items()},
        docs / "decode-efficiency.svg": plots.efficiency(last_run("decode")),
        docs / "serving.svg": plots.ratios(
            "GVA over GQA in vLLM, a 350M model on an H200",
            "medians; requests x tokens in / out",
            [line for line in asked.serving() if line.values and not line.most],
            longest=2.1,
        ),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
