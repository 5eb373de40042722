"""Decode speed of the rows of a comparison: measured once, kept with a run, told why where it is not."""

import csv

import pytest
import torch

from gva.cli import main
from gva.config import GvaConfig
from gva.ops import flash
from gva.paged.generator import PagedGenerator
from gva.run.metrics import read_metrics
from gva.study import speed
from gva.study.archive import archive
from gva.study.matrix import Matrix, Row, run_folder
from gva.study.results import load
from gva.study.runner import Runner
from gva.train.recipe import read_overrides
from study.folders import SPEED, write_run
from train.runs import SIZE

CPU = torch.device("cpu")


def lines(folder):
    return read_metrics(folder, "decode")


@pytest.mark.parametrize(
    ("variant", "attention"),
    [("gqa", "torch"), ("mla", "reference"), ("gva-drope-16", "reference"), ("shared-kv", "torch, keys rebuilt")],
)
def test_every_timed_step_reads_the_whole_context(variant, attention, monkeypatch):
    seen = []
    step = PagedGenerator.step

    def watched(generator):
        step(generator)
        seen.append(generator.cache.seq_lens.tolist())

    monkeypatch.setattr(PagedGenerator, "step", watched)
    config = GvaConfig.preset("demo", variant=variant)
    found = speed.measure(config, CPU, batch=3, context=100, steps=2)
    assert seen == [[100] * 3] * (speed.WARM_UP + 2)
    assert found["tokens_per_second"] == pytest.approx(3e3 / found["step_ms"])
    assert (found["batch"], found["context"], found["gpu"], found["attention"]) == (3, 100, "cpu", attention)
    assert set(found) == set(SPEED)


def test_what_would_mislead_is_not_measured():
    reason = speed.why_not(GvaConfig.preset("demo", variant="gqa"), CPU)
    assert "FlashAttention-3 was not loaded" in reason
    assert speed.why_not(GvaConfig.preset("demo", variant="shared-kv"), CPU) is None


def study(*variants):
    fields = {**read_overrides(None, SIZE), "steps": 8, "eval_every": 4}
    return Matrix("demo", tuple(Row(name, name, (0, 1), fields) for name in variants))


def test_without_a_gpu_nothing_is_measured(tmp_path, data):
    words = ["--preset", "demo", "--variants", "gqa", "--seeds", "1", "--data", str(data), "--out", str(tmp_path)]
    assert main(["compare", *words, "--device", "cpu", "--steps", "8", *SIZE]) == 0
    assert lines(tmp_path / "runs" / "gqa" / "seed-0") == []
    assert not (tmp_path / "report" / "decode.csv").exists()
    assert "Decode speed" not in (tmp_path / "report" / "report.md").read_text()


def test_each_row_is_measured_once_in_a_process_of_its_own(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    matrix = study("gqa", "shared-kv")
    gqa, shared = (run_folder(tmp_path, row.name, 0) for row in matrix.rows)
    Runner(matrix, data, tmp_path, device="cpu").execute(matrix.runs())
    monkeypatch.setattr(speed, "on_gpu", lambda device: True)
    monkeypatch.setattr(speed, "TOKENS", 512)
    Runner(matrix, data, tmp_path, device="cpu", decode_speed=False).execute(matrix.runs())
    assert lines(gqa) == lines(shared) == []
    outcome = Runner(matrix, data, tmp_path, device="cpu", weights="none").execute(matrix.runs())
    assert len(outcome.finished) == 4
    (line,) = lines(shared)
    assert (line["batch"], line["context"]) == (2, 256)
    assert "not loaded" in lines(gqa)[0]["reason"]
    assert lines(run_folder(tmp_path, matrix.rows[0].name, 1)) == []
    told = capsys.readouterr().out
    assert "shared-kv: decode speed " in told
    assert "gqa: decode speed not measured: FlashAttention-3" in told
    # The same command again: what was measured stays, what was not is tried, and a crash is a reason too.
    monkeypatch.setattr(Runner, "_run_module", lambda *_: -9)
    outcome = Runner(matrix, data, tmp_path, device="cpu").execute(matrix.runs())
    assert not outcome.failed
    assert lines(shared) == [line]
    assert lines(gqa)[0]["reason"] == "measuring it failed: killed by signal 9"


def test_a_failure_is_a_reason(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more of it")

    run = write_run(tmp_path, "shared-kv", 0, 4.0)
    monkeypatch.setattr(speed, "stop_with", lambda parent: None)
    monkeypatch.setattr(speed, "measure", fail)
    job = {"run": str(run), "device": "cpu", "fa3": None, "tokens": 512, "parent": 0}
    speed.main(job)
    speed.main(job)
    (line,) = lines(run)
    assert line["reason"] == "OutOfMemoryError: CUDA out of memory."
    assert not speed.is_measured(run)


def test_a_sweep_is_measured_once_per_row(tmp_path, data, monkeypatch):
    matrix = Matrix("demo", (Row("gqa", "gqa", (0,)),)).sweep([1e-3, 2e-3])
    for row in matrix.rows:
        write_run(tmp_path, row.name, 0, 4.0 - row.overrides["lr"], variant="gqa", of="gqa", fields=row.overrides)
    runner = Runner(matrix, data, tmp_path, device="cpu", progress=False)
    monkeypatch.setattr(runner, "_measure_speed", lambda name, run: speed.keep(run, SPEED))
    runner._measure_speeds(list(matrix.rows))
    assert [len(lines(run_folder(tmp_path, row.name, 0))) for row in matrix.rows] == [1, 0]
    assert [line["tokens_per_second"] for line in load([tmp_path]).row("gqa").speeds] == [1000.0], "of the other rate"


def test_speeds_of_several_machines_are_kept_apart(tmp_path):
    speed.keep(write_run(tmp_path / "a", "gqa", 0, 4.0), SPEED)
    speed.keep(write_run(tmp_path / "b", "gqa", 1, 4.0), {**SPEED, "gpu": "H100", "tokens_per_second": 800.0})
    speed.keep(write_run(tmp_path / "c", "gqa", 2, 4.0), {"reason": "no kernel"})
    speed.keep(write_run(tmp_path / "b", "mla", 1, 4.0), {**SPEED, "gpu": "H100", "tokens_per_second": 1200.0})
    speed.keep(write_run(tmp_path / "c", "mqa", 1, 4.0), {**SPEED, "gpu": "A100"})
    speed.keep(write_run(tmp_path / "c", "gta", 1, 4.0), {"reason": "no kernel"})
    folders = [tmp_path / name for name in "abc"]
    archive(folders, tmp_path / "kept")
    for results in (load(folders), load([tmp_path / "kept"])):
        assert [line["gpu"] for line in results.row("gqa").speeds] == ["H200", "H100"]
        ratios = {row.name: [results.speed_against_baseline(line) for line in row.speeds] for row in results.rows}
        assert ratios == {"gqa": [1, 1], "mla": [1.5], "mqa": [None], "gta": [None]}


def test_what_lies_on_a_gpu_beside_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 << 30)
    assert speed.beside_tensors(torch.device("cuda")) == 5.0
    assert speed.beside_tensors(CPU) == 0.0


def test_the_report_says_where_others_were_on_the_gpu(tmp_path):
    speed.keep(write_run(tmp_path, "gqa", 0, 4.0), {**SPEED, "beside_gib": 46.8})
    speed.keep(write_run(tmp_path, "mla", 0, 4.0), SPEED)
    assert main(["report", str(tmp_path)]) == 0
    (told,) = (
        line for line in (tmp_path / "report" / "report.md").read_text().splitlines() if "Other processes" in line
    )
    assert told.endswith("may be in the figure: GQA 47 GiB.")


@pytest.mark.gpu
def test_a_comparison_on_a_gpu_finds_how_fast_its_rows_decode(tmp_path, data):
    words = ["--preset", "demo", "--variants", "gqa,shared-kv,gva-drope-16", "--seeds", "1"]
    words += ["--data", str(data), "--out", str(tmp_path), "--device", "cuda", "--steps", "8", *SIZE]
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    assert main(["compare", *words]) == 0
    with (tmp_path / "report" / "decode.csv").open() as file:
        found = {row["row"]: row for row in csv.DictReader(file)}
    assert len(found) == 3
    if flash.installed() is None:
        assert "FlashAttention-3 was not loaded" in found.pop("gqa")["reason"]
    assert {name: row.get("reason") or None for name, row in found.items()} == dict.fromkeys(found)
    for row in found.values():
        assert float(row["tokens_per_second"]) > 0
        assert row["gpu"] == torch.cuda.get_device_name()
        assert (row["batch"], row["context"]) == ("1024", "256")
        assert float(row["beside_gib"]) > held.nbytes / 2**30
    hopper = torch.cuda.get_device_capability() == (9, 0)  # its kernel reads rows, which many sequences have
    assert found["gva-drope-16"]["attention"] == ("cuda" if hopper else "triton")
    told = (tmp_path / "report" / "report.md").read_text()
    assert "## Decode speed" in told
    assert "Other processes held memory of the GPU" in told
    before = (tmp_path / "runs" / "gva-drope-16" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(["compare", *words]) == 0
    assert (tmp_path / "runs" / "gva-drope-16" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
