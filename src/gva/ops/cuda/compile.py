"""CUDA C++ to a running kernel, through the NVRTC of torch and the driver of the GPU. Nothing to install."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

SOURCES = ("device.cuh", "decode.cu")
KERNEL = b"read_rows"
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_


class Arguments(ctypes.Structure):
    """decode.cu's struct of the same name."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in (
            "q_absorbed", "q_rope", "rows", "block_table", "seq_lens", "cu_seqlens_q", "schedule", "out",
            "lse", "part_out", "part_lse")]
        + [(name, ctypes.c_int64) for name in (
            "q_token", "q_head", "r_token", "r_head", "page_bytes", "token_bytes", "table_row",
            "out_token", "out_head", "lse_token")]
        + [("scale_log2", ctypes.c_float)]
        + [(name, ctypes.c_int) for name in ("units", "blocks_per_seq", "max_shares")]
    )  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_OVERLAP = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


def source() -> str:
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text() for name in SOURCES)


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's own CUDA version: loaded already, on the loader's path, or in a wheel beside torch."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    beside = sorted((Path(torch.__file__).parent.parent / "nvidia").glob(f"*/lib/{name}"))
    for candidate in (name, *map(str, beside)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name}: not found (it comes with torch's CUDA wheels, and with the CUDA toolkit)")


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with status {status}")


def compile_source(defines: tuple[tuple[str, int], ...], arch: str = "sm_90") -> bytes:
    """The machine code of one shape."""
    library, program = nvrtc(), ctypes.c_void_p()
    code = source().encode()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), code, b"decode.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        if status:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"decode.cu does not compile with {options}:\n{log.value.decode()}")
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _context(device: torch.device) -> ctypes.c_void_p:
    """The one that torch uses on `device`."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver().cuDeviceGet(ctypes.byref(number), device.index), "cuDeviceGet")
    _check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "cuDevicePrimaryCtxRetain")
    return context


@functools.cache
def load(defines: tuple[tuple[str, int], ...], shared_bytes: int, device: torch.device) -> ctypes.c_void_p:
    """The kernel of one shape on `device`, the current one."""
    cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    code = compile_source(defines)
    _check(cuda.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, KERNEL), "cuModuleGetFunction")
    _check(cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, shared_bytes), "cuFuncSetAttribute")
    return function


def launch(
    defines: tuple[tuple[str, int], ...],
    arguments: Arguments,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    device: torch.device,
) -> None:
    """On the stream of `device`, both the current ones; may begin while the launch before it ends, and waits for it."""
    config = _LaunchConfig(
        (*grid, 1), (threads, 1, 1), shared_bytes, torch.cuda.current_stream(device).cuda_stream,
        ctypes.pointer(_OVERLAP), 1)  # fmt: skip
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    _check(driver().cuCtxSetCurrent(_context(device)), "cuCtxSetCurrent")  # a thread new to CUDA has none
    function = load(defines, shared_bytes, device)
    _check(driver().cuLaunchKernelEx(ctypes.byref(config), function, parameters, None), "cuLaunchKernelEx")
