"""The kernel in C, against float64 with the derived tolerance: on pages as the other kernels, and on single tensors."""

import os
import platform
import stat

import pytest
import torch
from ops_cases import assert_close, make_case

from gva import ops
from gva.ops import decode
from gva.ops.cpu import compile

needs_compiler = pytest.mark.skipif(compile.missing() is not None, reason=f"needs {compile.missing()}")
LENS = [37, 0, 130, 1, 64]
SMALL = {"G": 2, "R": 2, "d_h": 32, "d_r": 8, "dtype": torch.float32}


def run(case, **options):
    return ops.paged_attention(*case.args, impl="cpu", return_lse=True, **options)


def within(got, exact, eager):
    """`assert_close` of ops_cases, for what is no Case."""
    budget = 2 * (eager.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= budget


# ---- pages ----


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["separate", "row"])
def test_dtypes_and_layouts(dtype, layout):
    case = make_case(LENS, dtype=dtype, layout=layout)
    assert_close(*run(case), case)
    out, _ = run(case)
    assert torch.equal(ops.paged_attention(*case.args), out), "what runs on a CPU unless something else is asked for"


@needs_compiler
@pytest.mark.parametrize(("G", "R"), [(1, 1), (1, 64), (1, 65), (3, 5), (5, 3), (2, 8), (7, 1), (8, 2)])
def test_any_number_of_groups_and_heads(G, R):
    case = make_case([33, 0, 70], G=G, R=R, d_h=32, dtype=torch.float32)
    assert_close(*run(case), case)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("d_h", "d_r"), [(1, 2), (24, 8), (40, 48), (64, 16), (80, 24), (96, 64), (128, 32), (512, 64)]
)
def test_widths(d_h, d_r, dtype):
    """Whole vectors, and what is left of one."""
    for layout in ("separate", "row"):
        case = make_case([33, 70], G=3, R=2, d_h=d_h, d_r=d_r, dtype=dtype, layout=layout)
        assert_close(*run(case), case)


@needs_compiler
@pytest.mark.parametrize("page", [1, 3, 16, 64, 256])
def test_page_sizes(page):
    case = make_case([3 * page + 5, 0, 2 * page, 1] if page > 1 else LENS, **{**SMALL, "page": page})
    assert_close(*run(case), case)


@needs_compiler
@pytest.mark.parametrize(
    "queries", [1, 2, 5, 8, 16, [1, 16, 3, 1, 40], [0, 2, 0, 1, 64]], ids=["1", "2", "5", "8", "16", "mixed", "gaps"]
)
@pytest.mark.parametrize("R", [2, 12])
def test_several_queries(queries, R):
    case = make_case([37, 20, 130, 1, 64], queries=queries, **{**SMALL, "R": R})
    assert_close(*run(case), case)


@needs_compiler
def test_pieces_are_merged_and_depend_on_nothing_else():
    """Neither on how many threads there are, nor on the batch."""
    case = make_case([2500, 0, 1024, 1025, 90], queries=3, **SMALL)
    out, lse = run(case)
    assert_close(out, lse, case)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again, lse_again = run(case)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)
    for name in ("q_absorbed", "q_rope"):
        setattr(case, name, getattr(case, name)[:3])
    case.block_table, case.seq_lens, case.cu_seqlens_q = case.block_table[:1], case.seq_lens[:1], case.cu_seqlens_q[:2]
    alone, lone_lse = run(case)
    assert torch.equal(alone, out[:3])
    assert torch.equal(lone_lse, lse[:3])


@needs_compiler
@pytest.mark.parametrize("size", [1e-30, 1e4])
def test_scores_of_any_size(size):
    """Sharp as a maximum, or flat; the largest score far from the others and not first."""
    case = make_case([100, 3], **SMALL)
    case.q_absorbed.mul_(size)
    assert_close(*run(case), case)


@needs_compiler
def test_strided_inputs_and_output():
    case = make_case(LENS, **SMALL)
    wide = torch.stack([case.q_absorbed, case.q_absorbed], 2)
    case.q_absorbed = wide[:, :, 1]
    case.seq_lens = torch.stack([case.seq_lens, case.seq_lens * 2], 1)[:, 0]
    case.cu_seqlens_q = torch.stack([case.cu_seqlens_q, case.cu_seqlens_q * 2], 1)[:, 0]
    case.block_table = case.block_table.t().contiguous().t()
    out = torch.full((5, 4, 40), float("nan"))[..., :32]
    got, lse = run(case, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert_close(got, lse, case)


@needs_compiler
def test_no_sequences():
    case = make_case([4], **SMALL)
    empty = (case.q_absorbed[:0], case.q_rope[:0], case.value_pages, case.rope_pages, case.block_table[:0],
             case.seq_lens[:0], None, 1, case.scale)  # fmt: skip
    assert ops.paged_attention(*empty, impl="cpu").shape == (0, 4, 32)


@needs_compiler
def test_a_length_past_the_table_is_refused():
    case = make_case([4], **SMALL)
    case.seq_lens += 16 * case.block_table.shape[1]
    with pytest.raises(ValueError, match=r"seq_lens: a sequence of 36 tokens, block_table has pages for 32"):
        run(case)


# ---- keys and values in pages ----


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("d_k", "d_r", "d_v"), [(32, 0, 32), (24, 8, 32), (48, 16, 20)])
def test_keys_beside_values(d_k, d_r, d_v, dtype):
    """What GQA caches, and keys of their own beside a slice; poison where no token is."""
    lengths, G, R, page = [37, 0, 1100], 2, 3, 16
    counts = [-(-n // page) for n in lengths]
    order, table = torch.randperm(sum(counts) + 2).int(), torch.full((3, max(counts)), 2_147_480_000, dtype=torch.int32)
    held = {width: torch.full((sum(counts) + 2, page, G, width), float("nan"), dtype=dtype) for width in {d_k, d_v}}
    keys, values = held[d_k], held[d_v].clone()
    k_rope = torch.full((sum(counts) + 2, page, d_r), float("nan"), dtype=dtype) if d_r else None
    q, q_rope = torch.randn(3, G * R, d_k).to(dtype), torch.randn(3, G * R, d_r).to(dtype) if d_r else None
    exact, eager = torch.zeros(3, G * R, d_v).double(), torch.zeros(3, G * R, d_v, dtype=dtype)
    for b, n in enumerate(lengths):
        own = order[sum(counts[:b]) :][: counts[b]]
        table[b, : counts[b]] = own
        parts = []
        for part in filter(lambda x: x is not None, (keys, k_rope, values)):
            rows = torch.randn(n, *part.shape[2:]).to(dtype)
            part.view(-1, *part.shape[2:])[own.long().repeat_interleave(page)[:n] * page + torch.arange(n) % page] = (
                rows
            )
            parts.append(rows)
        if n == 0:
            continue
        k, v = parts[0], parts[-1]
        whole = q[b]
        if d_r:
            k, whole = torch.cat([k, parts[1][:, None].expand(n, G, d_r)], -1), torch.cat([q[b], q_rope[b]], -1)
        for into in (exact, eager):
            k_, v_, q_ = (x.to(into.dtype) for x in (k, v, whole))
            scores = torch.einsum("grd,tgd->grt", q_.view(G, R, -1), k_) * 0.2
            weights = scores.to(torch.promote_types(into.dtype, torch.float32)).softmax(-1).to(into.dtype)
            into[b] = torch.einsum("grt,tgd->grd", weights, v_).flatten(0, 1)
    out = torch.full((3, G * R, d_v), float("nan"), dtype=dtype)
    decode.pages(q, q_rope, keys, k_rope, values, table, torch.tensor(lengths, dtype=torch.int32), 0.2, out)
    assert not out[1].any()
    within(out, exact, eager)


# ---- one tensor a cache ----


def plain(q, q_rope, values, k_rope, mask, scale):
    R = q.shape[2] // values.shape[2]
    values = values.repeat_interleave(R, 2)
    scores = (torch.einsum("bshd,bthd->bhst", q, values) + torch.einsum("bshd,btd->bhst", q_rope, k_rope)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    return torch.einsum("bhst,bthd->bshd", weights, values)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("of_all", [True, False], ids=["one mask", "a mask each"])
def test_tensors_under_a_mask(S, of_all, dtype):
    """Left-padded sequences in a cache with room to spare: NaN where nothing is shown."""
    B, T, G, R, d_h, d_r = 3, 1300, 2, 4, 32, 16
    q = torch.randn(B, G * R, S, d_h).to(dtype).transpose(1, 2)
    q_rope = torch.randn(B, S, G * R, d_h + d_r).to(dtype)[..., d_h:]
    state, slice_ = torch.randn(B, 1, T, G * d_h).to(dtype), torch.randn(B, 1, T, d_r).to(dtype)
    mask = torch.zeros(1 if of_all else B, 1, S, T, dtype=torch.bool)
    for b, first in enumerate([40, 0, 1150][: len(mask)]):
        for s in range(S):
            mask[b, 0, s, first : T - 90 - S + s] = True
    values, k_rope = state.squeeze(1).unflatten(2, (G, d_h)), slice_.squeeze(1)
    exact = plain(*(x.double() for x in (q, q_rope, values, k_rope)), mask, 0.2)
    eager = plain(q, q_rope, values, k_rope, mask, 0.2)
    unseen = ~mask.any(2)[:, 0].expand(B, T)
    values[unseen], k_rope[unseen] = float("nan"), float("nan")
    assert decode.takes(q, q_rope, values, k_rope)
    within(decode.tensors(q, q_rope, values, k_rope, mask, 0.2), exact, eager)


@needs_compiler
@torch.no_grad()
def test_tensors_without_a_mask():
    q, q_rope, values, k_rope = (
        torch.randn(2, 1, 4, 32),
        torch.randn(2, 1, 4, 8),
        torch.randn(2, 9, 2, 32),
        torch.randn(2, 9, 8),
    )
    exact = plain(*(x.double() for x in (q, q_rope, values, k_rope)), None, 0.2)
    within(decode.tensors(q, q_rope, values, k_rope, None, 0.2), exact, plain(q, q_rope, values, k_rope, None, 0.2))


@needs_compiler
def test_what_is_left_to_plain_torch():
    q, cached = torch.randn(2, 4, 8), torch.randn(2, 9, 2, 8)
    assert not decode.takes(q, cached), "where a gradient may be wanted"
    with torch.no_grad():
        assert decode.takes(q, cached)
        assert not decode.takes(q, cached.bfloat16())
        assert not decode.takes(q.double(), cached.double())
        assert not decode.takes(q.half(), cached.half())
        assert not decode.takes(q, cached.transpose(2, 3))
        assert not decode.takes(q.to("meta"), cached.to("meta"))


# ---- the compiler ----


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """As in a process that has compiled nothing yet, and whose folder for caches is `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kept in (compile.library, compile.missing):
        kept.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    for kept in (compile.library, compile.missing):
        kept.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_plain_torch_goes_on_and_a_name_is_refused(compiler, anew, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    case = make_case(LENS, **SMALL)
    with pytest.raises(RuntimeError, match=rf"impl='cpu' needs a C compiler.*{compiler}"):
        run(case)
    assert_close(ops.paged_attention(*case.args), None, case)
    with torch.no_grad():
        assert not decode.takes(case.q_absorbed, case.value_pages)
    assert not list(anew.rglob("*.so"))


def test_what_the_kernel_does_not_know_is_refused_by_name():
    for options in ({"fp8": True}, {"dtype": torch.float16}):
        case = make_case(LENS, **options)
        with pytest.raises(
            RuntimeError, match=r"impl='cpu' needs queries and values of float32, or both of bfloat16; got"
        ):
            ops.paged_attention(*case.args, value_scales=case.value_scales, impl="cpu")
    with pytest.raises(ValueError, match="impl='cpu': attends to a cache without a plan"):
        ops.absorb(torch.randn(3, 4, 8), torch.randn(4, 8, 16), impl="cpu")
    with pytest.raises(ValueError, match="impl='cpu': attends to a cache without a plan"):
        ops.plan_decode(
            torch.ones(1, dtype=torch.int32), H=2, G=1, d_h=8, d_r=8, page=4, dtype=torch.float32, impl="cpu"
        )


@needs_compiler
def test_it_is_compiled_once_into_a_folder_of_the_users_own(anew):
    case = make_case(LENS, **SMALL)
    first, _ = run(case)
    (file,) = anew.rglob("*.so")
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    made = file.stat().st_mtime_ns
    compile.library.cache_clear(), compile.missing.cache_clear()
    assert torch.equal(run(case)[0], first)
    assert [found.stat().st_mtime_ns for found in anew.rglob("*.so")] == [made]


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a processor with vectors of several widths")
@pytest.mark.parametrize("narrower", ["-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-avx"], ids=["8", "4"])
def test_vectors_of_any_width(narrower, anew, monkeypatch):
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {narrower}")
    for case in (
        make_case([37, 0, 1100], queries=3, **{**SMALL, "d_h": 40, "d_r": 12}),
        make_case([130, 5], G=2, R=5, d_h=64, dtype=torch.bfloat16),
    ):
        assert_close(*run(case), case)


@needs_compiler
@pytest.mark.parametrize("what", ["written by others", "a link", "a file"])
def test_a_folder_that_is_not_private_is_not_used(what, anew):
    """Whoever can write there could have left code."""
    elsewhere, place = anew / "elsewhere", anew / "gva"
    elsewhere.mkdir(mode=0o700)
    if what == "written by others":
        place.mkdir()
        os.chmod(place, 0o777)
    elif what == "a link":
        place.symlink_to(elsewhere)
    else:
        place.write_text("")
    assert compile.folder() is None
    case = make_case(LENS, **SMALL)
    assert_close(*run(case), case)
    assert not list(anew.rglob("*.so"))
