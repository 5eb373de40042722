"""What `gva serve` chooses where nobody says: flags of vLLM whose defaults do not suit our kernels, or a model so small
that the GPU is done with a step before Python has launched the next. Imports no vLLM.

Measured on an H200 with 350M parameters (docs/serving.md); for other sizes it is reckoned from their FLOPs.
"""

from dataclasses import dataclass
from typing import Any

from gva.serve.flags import Flags

PAGE = 64  # tokens: a tile of our kernels then lies in one page
LARGE = 64 * 2**30  # bytes of a GPU with room for the activations of a long step, and vLLM's defaults on it:
STEP, GRAPHS = 8192, 512  # tokens of a step of the server, and of the largest one that is a graph
LONG = 16384  # tokens of the longest step that was tried
BUSY = 15e12  # FLOPs that take about as long as Python takes to launch a step: 25 ms at 600 TFLOP/s


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes


@dataclass(frozen=True)
class Setting:
    """A flag, its values, and what it is good for."""

    flag: str
    values: list[str]
    why: str

    @property
    def told(self) -> str:
        shown = self.values if len(self.values) < 8 else [*self.values[:3], "...", self.values[-1]]
        return f"{self.flag} {' '.join(shown)}: {self.why}"


def found_gpu() -> Gpu | None:
    """The first GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory)


def settings(config: Any, parameters: int, flags: Flags, gpu: Gpu | None) -> list[Setting]:
    """What to add to the user's flags, for a model of so many parameters. Nothing on a CPU, nor where vLLM's own
    attention reads the cache."""
    chosen: list[Setting] = []
    if gpu is None or not any(layer.row.packs for layer in config.layer_configs):
        return chosen
    if not flags.has("block-size"):
        chosen.append(Setting("--block-size", [str(PAGE)], "a tile of the kernel lies in one page"))
    if gpu.memory < LARGE:
        return chosen
    ranks = _number(flags, "tensor-parallel-size") or 1
    idle = int(BUSY * ranks / (2 * parameters))  # tokens of the longest step that is over so soon
    step = STEP
    if flags.has("max-num-batched-tokens"):
        step = _number(flags, "max-num-batched-tokens")
    elif idle > STEP:
        step = LONG
        why = "as many launches for twice vLLM's tokens, since the GPU waits for them"
        chosen.append(Setting("--max-num-batched-tokens", [str(step)], why))
    largest = min(idle, step) // GRAPHS * GRAPHS
    if largest > GRAPHS and not _says_of_graphs(flags):
        why = "longer steps with prompts are graphs too, instead of launches one by one"
        chosen.append(Setting("--cudagraph-capture-sizes", [str(n) for n in capture_sizes(largest)], why))
    return chosen


def capture_sizes(largest: int) -> list[int]:
    """vLLM's own, then one every 512 tokens."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, GRAPHS, 16), *range(GRAPHS, largest + 1, GRAPHS)]


def _number(flags: Flags, name: str) -> int:
    """0 where there is none, or one in words of vLLM's, as 8k."""
    told = flags.value(name) or ""
    return int(told) if told.isdecimal() else 0


def _says_of_graphs(flags: Flags) -> bool:
    names = ("cudagraph-capture-sizes", "max-cudagraph-capture-size", "enforce-eager", "compilation-config")
    return any(flags.has(name) for name in names)
