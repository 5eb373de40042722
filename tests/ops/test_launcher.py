"""A remembered launch is the launch Triton would have made."""

from types import SimpleNamespace

import pytest
import torch

launcher = pytest.importorskip("gva.ops.triton.launcher")

CONSTANTS = launcher.Constants(WIDTH=64, EVEN=True)


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
    constants = launcher.Constants(EVEN=True, num_warps=4, WIDTH=64)
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
        {"constants": launcher.Constants(WIDTH=32, EVEN=True, num_warps=4)},
    ],
    ids=["dtype", "alignment", "a multiple of 16", "one", "constants"],
)
def test_what_triton_compiles_anew_for_is_asked_of_triton(kernel, change):
    launch = launcher.Launcher(kernel)
    usual = {"x": aligned(), "n": 7, "constants": launcher.Constants(WIDTH=64, EVEN=True, num_warps=4)}
    for call in (usual, {**usual, **change}):
        launch((1,), call["constants"], call["x"], call["n"])
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_a_number_that_is_not_specialised_changes_nothing_but_its_type(kernel):
    kernel.params = tuple(SimpleNamespace(num=i, do_not_specialize=i == 1) for i in range(4))
    launch, x, constants = launcher.Launcher(kernel), aligned(), launcher.Constants(WIDTH=64, EVEN=True)
    for n in (7, 1, 16, 2**31 - 1):
        launch((1,), constants, x, n)
    assert len(kernel.compiled) == 1
    assert [arguments[1] for _, arguments in kernel.launched] == [1, 16, 2**31 - 1]
    launch((1,), constants, x, 2**31)
    assert len(kernel.compiled) == 2


def test_what_is_traced_or_taken_over_is_not_remembered(kernel, monkeypatch):
    launch, x = launcher.Launcher(kernel), aligned()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    launch((1,), CONSTANTS, x, 7)
    monkeypatch.undo()
    assert launch.compiled == {}

    class TakenOver(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments, **named: None

    launch = launcher.Launcher(TakenOver())
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=kernel.driver))
    launch((1,), CONSTANTS, x, 7)
    launch((1,), CONSTANTS, x, 7)
    assert launch.compiled == {}


def test_another_device_is_another_kernel(kernel):
    launch, x = launcher.Launcher(kernel), aligned()
    launch((1,), CONSTANTS, x, 7)
    kernel.driver.device = 1
    launch((1,), CONSTANTS, x, 7)
    assert len(kernel.compiled) == 2


def test_sizes_that_change_at_every_launch_do_not_pile_up(kernel):
    launch, x = launcher.Launcher(kernel), aligned()
    for n in range(3 * launcher.REMEMBERED):
        launch((1,), CONSTANTS, x, n)
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


def test_a_call_made_again_is_remembered(monkeypatch):
    """Constants are told apart by identity: whoever made them anew at every call would compile at every call."""
    launch = pytest.importorskip("gva.ops.triton.launch")
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
    monkeypatch.setattr(launcher, "driver", driver)
    names = ("plan", "decode", "merge", "append", "absorb", "expand")
    for name in names:
        ours = getattr(launch, f"{name}_kernel")
        monkeypatch.setattr(launch, f"{name}_kernel", launcher.Launcher(Jit(ours.kernel)))
    pages, maps = torch.zeros(3, 16, 2, 32), torch.zeros(4, 16, 32)
    values, k_rope, slots = torch.zeros(5, 2, 32), torch.zeros(5, 16), torch.arange(5)
    lengths, table = torch.ones(5, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32)
    config = config_of(lengths)
    sizes = {"B": 5, "G": 2, "R": 2, "d_h": 32, "max_seqlen_q": 1, "split_tiles": 0, "max_tokens": 0}
    workspace = launch.allocate(config, torch.device("cpu"), **sizes)
    for _ in range(3):
        rope_pages = torch.zeros(3, 16, 16)
        launch.append(values, k_rope, pages, rope_pages, slots, None, None, None, None)
        q = launch.absorb(torch.zeros(5, 4, 32), maps)
        launch.expand(values, k_rope, maps)
        launch.expand(pages, rope_pages, maps, slots)
        launch.fill_schedule(config, workspace, lengths, None, 1)
        out, q_rope = torch.empty(5, 4, 32), torch.zeros(5, 4, 16)
        launch.attend(
            config, workspace, 0, q, q_rope, pages, rope_pages, table, lengths, None, 1, 0.1, None, out, None
        )  # fmt: skip
    assert len(compilations) == len(names) + 1  # expand twice


def config_of(lengths):
    from gva.ops.config import pick

    return pick(
        None, lengths.device, torch.float32, torch.float32, G=2, R=2, d_h=32, d_r=16, page=16, max_seqlen_q=1,
        B=len(lengths), row_stride=64, in_rows=False)  # fmt: skip
