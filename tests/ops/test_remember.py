"""A remembered launch is the launch Triton would have made."""

from types import SimpleNamespace

import pytest
import torch

from gva import ops
from gva.ops import dispatch, fast

remember = pytest.importorskip("gva.ops.triton.remember")

CONSTANTS = remember.Constants(WIDTH=64, EVEN=True)


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """Notes what it is asked to compile."""

    cache_key = "a JIT function has one; what the interpreter makes of it has none"
    arg_names = ("x", "n", "WIDTH", "EVEN")
    params = tuple(SimpleNamespace(num=i, do_not_specialize=False) for i in range(4))

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

    monkeypatch.setattr(remember, "driver", Driver)
    kernel = Kernel()
    kernel.driver = Driver.active
    return kernel


def aligned(count=64, dtype=torch.float32, offset=0):
    storage = torch.zeros(count * 8 + 32, dtype=torch.uint8)
    start = -storage.data_ptr() % 16 + offset
    return storage[start : start + count * dtype.itemsize].view(dtype)


def test_the_second_launch_is_the_compiled_one_with_all_arguments_in_order(kernel):
    launch, x, y = remember.Remembered(kernel), aligned(), aligned()
    constants = remember.Constants(EVEN=True, num_warps=4, WIDTH=64)
    launch((5,), constants, x, 7)
    assert len(kernel.compiled) == 1
    assert kernel.launched == []
    launch((6, 2), constants, y, 7)
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
        {"constants": remember.Constants(WIDTH=32, EVEN=True, num_warps=4)},
    ],
    ids=["dtype", "alignment", "a multiple of 16", "one", "constants"],
)
def test_what_triton_compiles_anew_for_is_asked_of_triton(kernel, change):
    launch = remember.Remembered(kernel)
    usual = {"x": aligned(), "n": 7, "constants": remember.Constants(WIDTH=64, EVEN=True, num_warps=4)}
    for call in (usual, {**usual, **change}):
        launch((1,), call["constants"], call["x"], call["n"])
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_a_number_that_is_not_specialised_changes_nothing_but_its_type(kernel):
    kernel.params = tuple(SimpleNamespace(num=i, do_not_specialize=i == 1) for i in range(4))
    launch, x, constants = remember.Remembered(kernel), aligned(), remember.Constants(WIDTH=64, EVEN=True)
    for n in (7, 1, 16, 2**31 - 1):
        launch((1,), constants, x, n)
    assert len(kernel.compiled) == 1
    assert [arguments[1] for _, arguments in kernel.launched] == [1, 16, 2**31 - 1]
    launch((1,), constants, x, 2**31)
    assert len(kernel.compiled) == 2


def test_what_is_traced_or_taken_over_is_not_remembered(kernel, monkeypatch):
    launch, x = remember.Remembered(kernel), aligned()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    launch((1,), CONSTANTS, x, 7)
    monkeypatch.undo()
    assert launch.compiled == {}

    class TakenOver(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments, **named: None

    launch = remember.Remembered(TakenOver())
    monkeypatch.setattr(remember, "driver", SimpleNamespace(active=kernel.driver))
    launch((1,), CONSTANTS, x, 7)
    launch((1,), CONSTANTS, x, 7)
    assert launch.compiled == {}


def test_another_device_is_another_kernel(kernel):
    launch, x = remember.Remembered(kernel), aligned()
    launch((1,), CONSTANTS, x, 7)
    kernel.driver.device = 1
    launch((1,), CONSTANTS, x, 7)
    assert len(kernel.compiled) == 2


def test_sizes_that_change_at_every_launch_do_not_pile_up(kernel):
    launch, x = remember.Remembered(kernel), aligned()
    for n in range(3 * remember.REMEMBERED):
        launch((1,), CONSTANTS, x, n)
    assert len(launch.compiled) <= remember.REMEMBERED


@pytest.fixture
def launches():
    """Module and name of every launch of ours."""
    triton = pytest.importorskip("gva.ops.triton")
    found = {"plan": triton.attend, "decode": triton.attend, "merge": triton.attend}
    found |= {"append": triton.append, "absorb": triton.absorb, "expand": triton.expand}
    return [(module, f"launch_{name}") for name, module in found.items()]


def test_every_kernel_of_ours_names_its_constants_behind_its_arguments(launches):
    for ours in (getattr(*place) for place in launches):
        function = getattr(ours.kernel, "fn", ours.kernel)
        kinds = ["constexpr" in str(kind) for kind in function.__annotations__.values()]
        names = list(function.__annotations__)
        assert all(kinds)
        assert names == list(ours.kernel.arg_names)[-len(names) :]


def test_a_call_made_again_is_remembered(monkeypatch, launches):
    """Constants are told apart by identity: whoever made them anew at every call would compile at every call."""
    compilations = []

    class Jit:
        cache_key = ""

        def __init__(self, kernel):
            function = getattr(kernel, "fn", kernel)
            self.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]
            self.params = ()

        def __getitem__(self, grid):
            return lambda *arguments, **named: compilations.append(self) or Compiled([])

    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
    monkeypatch.setattr(remember, "driver", driver)
    for module, name in launches:
        monkeypatch.setattr(module, name, remember.Remembered(Jit(getattr(module, name).kernel)))
    values, k_rope, slots, maps = torch.zeros(5, 2, 32), torch.zeros(5, 16), torch.arange(5), torch.zeros(4, 16, 32)
    lengths, table = torch.ones(5, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32)
    shape = {"H": 4, "G": 2, "d_h": 32, "d_r": 16, "page": 16, "dtype": torch.float32}
    plan = ops.plan_decode(lengths, **shape)
    for _ in range(3):
        pages = ops.Pages(torch.zeros(3, 16, 2, 32), torch.zeros(3, 16, 16))
        dispatch.append(values, k_rope, pages, slots, impl="triton")
        q = dispatch.absorb(torch.zeros(5, 4, 32), maps, impl="triton")
        dispatch.expand(values, k_rope, maps, impl="triton")
        dispatch.expand(*pages[:2], maps, slots, impl="triton")
        plan.update(lengths)
        fast.attend(plan, q, torch.zeros(5, 4, 16), pages, table, lengths, 0.1, torch.empty(5, 4, 32))
    assert len(compilations) == len(launches) + 1  # expand twice
