"""The CUDA kernel: on a Hopper GPU as it is, elsewhere compiled for the CPU, emulator.h in the place of device.cuh."""

import ctypes
import itertools
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ops_cases import assert_close, needs_triton
from ops_cases import make_case as make_any_case

from gva import ops
from gva.ops.config import Config
from gva.ops.cuda import compile

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if HOPPER else "cpu"
pytestmark = [
    needs_triton,
    pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.skipif(not shutil.which("g++"), reason="no g++"),
    pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0"),
]
SMALL = {"G": 2, "R": 2, "d_h": 32, "d_r": 8}


def make_case(*args, **options):
    return make_any_case(*args, layout="row", **options)


@pytest.fixture(autouse=True)
def emulate(monkeypatch, tmp_path_factory):
    """Without a GPU, what would be launched there runs here."""
    if HOPPER:
        return
    header, folder = Path(__file__).with_name("emulator.h"), tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)
    seeds = itertools.count()

    def launch(defines, arguments, grid, threads, shared_bytes, device):
        name = "_".join(str(value) for _, value in defines)
        library = folder / f"{name}.so"
        if not library.exists():
            code = f'#include "{header}"\n' + (Path(compile.__file__).with_name("decode.cu")).read_text()
            code += "\nvoid call(const Arguments* a) { read_rows(*a); }\n"
            options = [f"-D{key}={value}" for key, value in defines]
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *options, "-x", "c++", "-", "-o", library]
            subprocess.run(command, input=code.encode(), check=True)
        ctypes.CDLL(str(library)).emulate(ctypes.byref(arguments), *grid, threads, shared_bytes, next(seeds))

    monkeypatch.setattr(compile, "launch", launch)


def run(case, *, tile=16, warps=1, stages=3, per_sm=1, uniform=False, **options):
    """Under a configuration of its own, so that small shapes come in several shares."""
    _, H, d_h = case.q_absorbed.shape
    page, G = case.value_pages.shape[1:3]
    rows = -(-case.max_seqlen_q * (H // G) // 8) * 8
    cu = None if uniform else case.cu_seqlens_q
    config = Config(tile, G, rows, case.max_seqlen_q, warps, stages, per_sm, per_sm, 1)
    plan = ops.plan_decode(
        case.seq_lens, H=H, G=G, d_h=d_h, d_r=case.q_rope.shape[2], page=page, dtype=case.q_absorbed.dtype,
        value_dtype=case.value_pages.dtype, max_seqlen_q=case.max_seqlen_q, cu_seqlens_q=cu, config=config,
        **options)  # fmt: skip
    return ops.paged_attention(
        *case.args[:6], cu, case.max_seqlen_q, case.scale, value_scales=case.value_scales, impl="cuda",
        return_lse=True, plan=plan)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("tile", "page"), [(16, 16), (32, 16), (64, 64), (64, 16)])
def test_dtypes_and_tiles(dtype, tile, page):
    case = make_case([37, 0, 130, 1, 64], dtype=dtype, page=page, device=DEVICE)
    assert_close(*run(case, tile=tile), case)


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("d_h", [32, 64])
def test_fp8(warps, d_h):
    case = make_case([37, 0, 130, 1, 64], d_h=d_h, fp8=True, device=DEVICE)
    assert_close(*run(case, warps=warps), case)


@pytest.mark.parametrize(("G", "R", "warps"), [(1, 1, 1), (3, 5, 3), (5, 3, 1), (2, 8, 2), (6, 2, 3), (1, 24, 1)])
def test_any_number_of_groups_and_heads(G, R, warps):
    case = make_case([33, 0, 70], G=G, R=R, d_h=32, device=DEVICE)
    assert_close(*run(case, warps=warps), case)


@pytest.mark.parametrize("d_h", [80, 96, 128, 256])
def test_value_widths(d_h):
    case = make_case([33, 70], G=2, R=2, d_h=d_h, device=DEVICE)
    assert_close(*run(case, warps=2), case)


@pytest.mark.parametrize("d_r", [8, 24, 64])
@pytest.mark.parametrize("kind", ["row", "fp8"])
def test_positional_widths(d_r, kind):
    case = make_case([33, 70], G=4, R=2, d_h=32, d_r=d_r, fp8=kind == "fp8", device=DEVICE)
    assert_close(*run(case, warps=2), case)


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("kind", ["row", "fp8"])
@pytest.mark.parametrize("tile", [16, 32])
def test_page_sizes(page, kind, tile):
    lens = [3 * page + 5, 0, 2 * page, 1] if page > 1 else [37, 0, 130, 1, 64]
    case = make_case(lens, page=page, **SMALL, fp8=kind == "fp8", device=DEVICE)
    assert_close(*run(case, tile=tile), case)


@pytest.mark.parametrize("queries", [2, 5, 8, 16, [1, 16, 3, 1, 9], [0, 2, 0, 1, 7]], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_several_queries(queries, fp8):
    case = make_case([37, 20, 130, 1, 64], queries=queries, fp8=fp8, **SMALL, device=DEVICE)
    assert_close(*run(case, warps=2), case)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_uniform_and_many_units_per_share(fp8):
    case = make_case([5, 300, 0, 0, 16, 31, 2, 48, 100], queries=2, fp8=fp8, **SMALL, device=DEVICE)
    assert_close(*run(case, uniform=True, stages=5), case)


def test_scores_that_keep_rising():
    """The maximum moves again and again: later tokens weigh ever more."""
    case = make_case([200], **SMALL, poison=False, device=DEVICE)
    order = torch.cat([torch.arange(16) + 16 * int(p) for p in case.block_table[0, :13]])
    rise = torch.linspace(0, 40, len(order)).to(case.value_pages)
    case.value_pages[order // 16, order % 16] = case.q_absorbed.view(1, 2, 2, 32)[:, :, 0] * rise[:, None, None] / 8
    assert_close(*run(case), case)


def test_queries_that_are_almost_nothing():
    case = make_case([100, 3], fp8=True, **SMALL, device=DEVICE)
    case.q_absorbed.mul_(1e-38)
    case.q_rope.mul_(8)
    assert_close(*run(case), case)


def test_scales_far_apart():
    """Tokens of zeros, of tiny and of large values in one fp8 cache."""
    case = make_case([150], fp8=True, **SMALL, poison=False, device=DEVICE)
    scales = torch.rand(case.value_scales.shape, generator=torch.Generator().manual_seed(1))
    case.value_scales.copy_((scales * 40 - 30).exp2() * (scales < 0.9))
    assert_close(*run(case), case)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_fixed_split_is_bitwise_independent_of_the_batch(fp8):
    case = make_case([200, 0, 17, 90, 64], fp8=fp8, **SMALL, device=DEVICE)
    out, lse = run(case, split_tokens=32, max_tokens=256)
    assert_close(out, lse, case)
    order = torch.tensor([4, 2, 0, 1, 3], device=DEVICE)
    for name in ("q_absorbed", "q_rope", "block_table", "seq_lens"):
        setattr(case, name, getattr(case, name)[order].contiguous())
    assert torch.equal(run(case, split_tokens=32, max_tokens=256)[0], out[order])


def test_a_layout_that_the_copy_engine_cannot_read_is_refused():
    case = make_any_case([33], layout="separate", **SMALL, device=DEVICE)
    with pytest.raises(ValueError, match="in one row"):
        run(case)


def test_rows_with_gaps_are_refused(monkeypatch):
    """One copy takes many rows, so a plan for rows is not one for these, and without a plan Triton reads them."""
    case = make_case([100, 70], page=64, device=DEVICE)
    rows = torch.cat([case.value_pages.flatten(2), case.rope_pages, case.rope_pages], -1)
    case.value_pages, case.rope_pages = rows[..., :256].unflatten(-1, (4, 64)), rows[..., 256:272]
    with pytest.raises(ValueError, match="one right behind the other"):
        run(case, tile=64)
    monkeypatch.setattr("gva.ops.config.missing_hopper", lambda device: None)
    with pytest.raises(RuntimeError, match="rows that it can read"):
        ops.paged_attention(*case.args, impl="cuda")


def test_the_first_call_of_a_thread():
    case = make_case([33, 70], **SMALL, page=64, device=DEVICE)
    page, G, d_h = case.value_pages.shape[1:]
    config = Config(16, G, 8, 1, 1, 3, 1, 1, 1)
    plan = ops.plan_decode(case.seq_lens, H=4, G=G, d_h=d_h, d_r=8, page=page, dtype=torch.bfloat16, config=config)
    out = torch.empty_like(case.q_absorbed)

    def call():
        return ops.paged_attention(*case.args[:6], None, 1, case.scale, impl="cuda", plan=plan, out=out)

    call()
    out.fill_(float("nan"))
    with ThreadPoolExecutor(1) as pool:
        assert_close(pool.submit(call).result(), None, case)


TUNED = {
    "bf16": {},
    "bf16, one sequence": {"lens": [40]},
    "bf16, pages of 16": {"page": 16},
    "bf16, 4 queries": {"queries": 4},
    "bf16, wide": {"G": 8, "d_h": 128},
    "fp8": {"fp8": True},
    "fp8, wide": {"fp8": True, "G": 8, "d_h": 128},
    "fp8, wide, 4 queries": {"fp8": True, "G": 8, "d_h": 128, "queries": 4},
}


@pytest.mark.skipif(HOPPER or not shutil.which("nvcc"), reason="no nvcc, or a GPU that compiles for itself")
@pytest.mark.parametrize("options", TUNED.values(), ids=TUNED)
def test_what_is_chosen_compiles(options, monkeypatch, record_property, tmp_path):
    """As a GPU would be given it; what the machine code needs is recorded and bounded."""
    options = {"lens": [40, 70], "page": 64, **options}
    case = make_case(options.pop("lens"), **options)
    asked = {}
    monkeypatch.setattr(compile, "launch", lambda *call: asked.update(defines=call[0], shared=call[4]))
    monkeypatch.setattr("gva.ops.config.missing_hopper", lambda device: None)
    ops.paged_attention(
        *case.args[:6], None, case.max_seqlen_q, case.scale, value_scales=case.value_scales, impl="cuda"
    )
    source = tmp_path / "decode.cu"
    source.write_text(compile.source())
    defines = [f"-D{key}={value}" for key, value in asked["defines"]]
    command = [
        "nvcc",
        "-arch=sm_90",
        "-std=c++17",
        "-cubin",
        "-Xptxas",
        "-v",
        *defines,
        source,
        "-o",
        tmp_path / "cubin",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (
        int(re.search(what, told)[1]) for what in (r"Used (\d+) registers", r"(\d+) bytes spill loads")
    )
    record_property("decode.cu", {"registers": registers, "spilled": spilled, "shared": asked["shared"]})
    assert spilled <= 512, told
    assert asked["shared"] * dict(asked["defines"])["PER_SM"] <= 227 << 10
