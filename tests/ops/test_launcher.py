"""A remembered launch is the launch Triton would have made."""

from types import SimpleNamespace

import pytest
import torch

launcher = pytest.importorskip("gva.ops.triton.launcher")


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """Notes what it is asked to compile."""

    cache_key = "a JIT function has one; what the interpreter makes of it has none"
    arg_names = ("x", "n", "WIDTH", "EVEN")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def jit(*arguments, **named):
            self.compiled.append((arguments, named))
            return Compiled(self.launched)

        return jit


@pytest.fixture
def kernel(monkeypatch):
    class Driver:
        class active:
            device = 0

            @classmethod
            def get_current_device(cls):
                return cls.device

    monkeypatch.setattr(launcher, "driver", Driver)
    kernel = Kernel()
    kernel.driver = Driver.active
    return kernel


def aligned(count=64, dtype=torch.float32, offset=0):
    storage = torch.zeros(count * 8 + 32, dtype=torch.uint8)
    start = -storage.data_ptr() % 16 + offset
    return storage[start : start + count * dtype.itemsize].view(dtype)


def test_the_second_launch_is_the_compiled_one_with_all_arguments_in_order(kernel):
    launch, x, y = launcher.Launcher(kernel), aligned(), aligned()
    launch((5,), x, 7, EVEN=True, num_warps=4, WIDTH=64)
    assert len(kernel.compiled) == 1
    assert kernel.launched == []
    launch((6, 2), y, 7, EVEN=True, num_warps=4, WIDTH=64)
    assert len(kernel.compiled) == 1
    ((grid, arguments),) = kernel.launched
    assert grid[:3] == (6, 2, 1)
    assert arguments[0] is y
    assert arguments[1:] == (7, 64, True)


@pytest.mark.parametrize(
    "change",
    [
        {"x": aligned(dtype=torch.bfloat16)},
        {"x": aligned(offset=8)},
        {"n": 16},
        {"n": 1},
        {"WIDTH": 32},
        {"num_warps": 8},
    ],
    ids=["dtype", "alignment", "a multiple of 16", "one", "constant", "option"],
)
def test_what_triton_compiles_anew_for_is_asked_of_triton(kernel, change):
    launch, usual = launcher.Launcher(kernel), {"x": aligned(), "n": 7, "WIDTH": 64, "EVEN": True, "num_warps": 4}
    for named in (usual, {**usual, **change}):
        launch((1,), named.pop("x"), named.pop("n"), **named)
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_what_is_traced_or_taken_over_is_not_remembered(kernel, monkeypatch):
    launch, x = launcher.Launcher(kernel), aligned()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    launch((1,), x, 7, WIDTH=64, EVEN=True)
    monkeypatch.undo()
    assert launch.compiled == {}

    class TakenOver(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments, **named: None

    launch = launcher.Launcher(TakenOver())
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=kernel.driver))
    launch((1,), x, 7, WIDTH=64, EVEN=True)
    launch((1,), x, 7, WIDTH=64, EVEN=True)
    assert launch.compiled == {}


def test_another_device_is_another_kernel(kernel):
    launch, x = launcher.Launcher(kernel), aligned()
    launch((1,), x, 7, WIDTH=64, EVEN=True)
    kernel.driver.device = 1
    launch((1,), x, 7, WIDTH=64, EVEN=True)
    assert len(kernel.compiled) == 2


def test_sizes_that_change_at_every_launch_do_not_pile_up(kernel):
    launch, x = launcher.Launcher(kernel), aligned()
    for n in range(3 * launcher.REMEMBERED):
        launch((1,), x, n, WIDTH=64, EVEN=True)
    assert len(launch.compiled) <= launcher.REMEMBERED


def test_every_kernel_of_ours_names_its_constants_behind_its_arguments():
    launch = pytest.importorskip("gva.ops.triton.launch")
    for ours in (
        launch.plan_kernel,
        launch.decode_kernel,
        launch.merge_kernel,
        launch.append_kernel,
        launch.absorb_kernel,
        launch.expand_kernel,
    ):
        function = getattr(ours.kernel, "fn", ours.kernel)
        kinds = ["constexpr" in str(kind) for kind in function.__annotations__.values()]
        names = list(function.__annotations__)
        assert all(kinds)
        assert names == list(ours.kernel.arg_names)[-len(names) :]
