"""Generation on a paged cache for one device: prompts of any lengths, sequences that come and go.

Prefill runs the expanded form and writes pages. The decode step is one function of buffers that stay where they
are, so on a GPU it is captured once as a CUDA graph and replayed at every later length.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gva import ops
from gva.attention.rope import tables
from gva.cache import OutOfPages, PagedCache, PagedStep
from gva.errors import check
from gva.ops import flash


def run_layer(layer: Any, hidden: Tensor, rotation: Any, step: PagedStep, form: str) -> Tensor:
    return layer(hidden, position_embeddings=rotation, past_key_values=step, attention_form=form)


class PagedGenerator:
    """Decodes up to `batch` sequences at a time with a GvaForCausalLM of any variant.

    `temperature` 0 is greedy. `fp8` caches values in e4m3. `cuda_graph` None: on a GPU.
    `prefill_tokens`: how many tokens of prompts one forward pass takes; longer prompts take several.
    `compile`: the layers of the decode step go through torch.compile, which takes seconds once and saves launches.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        max_tokens: int,
        *,
        page: int = 64,
        pages: int | None = None,
        fp8: bool = False,
        temperature: float = 0.0,
        cuda_graph: bool | None = None,
        prefill_tokens: int = 16384,
        compile: bool = False,
    ) -> None:
        check(temperature >= 0, "temperature", temperature, "must not be negative")
        check(prefill_tokens >= page, "prefill_tokens", prefill_tokens, f"must be at least one page, {page}")
        self.prefill_tokens = prefill_tokens // page * page
        self.model, self.config, self.temperature = model, model.config, temperature
        weight = model.lm_head.weight
        self.cache = PagedCache(
            model.config, batch, max_tokens, page=page, pages=pages, dtype=weight.dtype, fp8=fp8, device=weight.device
        )
        self.device, self.max_tokens = weight.device, max_tokens
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.active = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.plan = self._make_plan()
        self.use_graph = self.device.type == "cuda" if cuda_graph is None else cuda_graph
        self.graph: Any = None
        self._compiled_layer = torch.compile(run_layer, fullgraph=True, dynamic=False) if compile else None

    def generate(self, prompts: Iterable[list[int]], max_new_tokens: int, end: int | None = None) -> list[list[int]]:
        """New tokens of each prompt, in the order of the prompts; the end token, if it comes, is the last."""
        results: dict[int, list[int]] = {}
        for number, token in self.stream(prompts, max_new_tokens, end):
            results.setdefault(number, []).append(token)
        return [results[number] for number in sorted(results)]

    @torch.no_grad()
    def stream(
        self, prompts: Iterable[list[int]], max_new_tokens: int, end: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """(number of the prompt, token) as they come. A sequence that ends makes room for the next prompt."""
        check(max_new_tokens > 0, "max_new_tokens", max_new_tokens, "must be positive")
        waiting = deque(enumerate(prompts))
        for number, prompt in waiting:
            check(len(prompt) > 0, f"prompt {number}", prompt, "must have at least one token")
            total, limit = len(prompt) + max_new_tokens, self.max_tokens
            check(total <= limit, f"prompt {number}", total, f"tokens, the new ones counted, exceed max_tokens={limit}")
            if self._pages(total) > self.cache.pages:
                raise OutOfPages(f"prompt {number} needs {self._pages(total)} pages, the cache has {self.cache.pages}")
        running: dict[int, list[int]] = {}  # slot -> [number of the prompt, tokens still to come, pages promised]
        try:
            while waiting or running:
                first = self._admit(waiting, running, max_new_tokens)
                yield from self._deliver(first, running, end)
                if not running:
                    continue
                self._reserve(running)
                self.step()
                tokens = self.tokens[:, 0].tolist()
                yield from self._deliver({slot: tokens[slot] for slot in running}, running, end)
        finally:
            for slot in list(running):
                self._end(slot, running)

    @torch.no_grad()
    def step(self) -> None:
        """One token for every active sequence: reads and rewrites `tokens`. Room must have been reserved."""
        if not self.use_graph:
            self._decode()
        elif self.graph is None:
            self.graph = self._capture()
            self.graph.replay()
        else:
            self.graph.replay()
        self.cache.lengths = [n + bool(self.cache.owned[i]) for i, n in enumerate(self.cache.lengths)]

    @torch.no_grad()
    def prefill(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Begin sequences in these slots; their first new tokens are then in `tokens`."""
        counts = [0] * self.cache.batch
        for slot, prompt in zip(slots, prompts, strict=True):
            counts[slot] = len(prompt)
        self.cache.reserve(counts)
        # Prompts of like lengths share a pass; a pass takes `prefill_tokens`, so a long prompt takes several.
        order = sorted(range(len(slots)), key=lambda i: len(prompts[i]))
        while order:
            chunk = min(len(prompts[order[-1]]), self.prefill_tokens)
            chosen = [order.pop() for _ in range(min(len(order), max(1, self.prefill_tokens // chunk)))]
            self._prefill(torch.tensor([slots[i] for i in chosen], device=self.device), [prompts[i] for i in chosen])
        self.cache.advance(counts)

    def _prefill(self, rows: Tensor, prompts: list[list[int]]) -> None:
        """The prompts of these sequences, in chunks that attend to the pages of those before."""
        width = max(map(len, prompts))
        padded = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=self.device)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        positions = torch.arange(width, device=self.device).expand(len(prompts), -1)
        inside = torch.where(positions < lengths[:, None], positions, -1)
        for start in range(0, width, self.prefill_tokens):
            part = slice(start, start + self.prefill_tokens)
            # Padding stands to the right, so causality keeps it away from every real token.
            step = PagedStep(self.cache, self.cache.slots(inside[:, part], rows), prefix=start, sequences=rows)
            hidden = self._layers(padded[:, part], positions[:, part], step)
            ending = [i for i, prompt in enumerate(prompts) if start < len(prompt) <= start + hidden.shape[1]]
            if ending:
                last = lengths[ending] - 1 - start
                self.tokens[rows[ending], 0] = self._choose(self.model.lm_head(hidden[ending, last]))
        self.active[rows] = 1

    def _decode(self) -> None:
        """The captured step: everything it reads or writes keeps its address."""
        cache = self.cache
        positions = torch.where(self.active > 0, cache.seq_lens, -1)[:, None]
        cache.seq_lens.add_(self.active)
        step = PagedStep(cache, cache.slots(positions), plan=self._plan())
        hidden = self._layers(self.tokens, positions.clamp(min=0), step)
        self.tokens.copy_(self._choose(self.model.lm_head(hidden[:, -1]))[:, None])

    def _layers(self, tokens: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(tokens)
        rotation = tables(self.config, positions, hidden.dtype)
        decoding = step.prefix is None
        form = "absorbed" if self.config.absorbs and decoding else "expanded"
        run = self._compiled_layer if decoding and self._compiled_layer else run_layer
        for index, layer in enumerate(inner.layers):
            hidden = run(layer, hidden, rotation, step.of_layer(index), form)
        return inner.norm(hidden)

    def _choose(self, logits: Tensor) -> Tensor:
        """Greedy, or a sample by the Gumbel trick, which needs no sync."""
        if self.temperature > 0:
            noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
            return (logits.float() / self.temperature + noise).argmax(-1)
        return logits.argmax(-1)

    def _capture(self) -> Any:
        """Run the step once aside to warm it up, undo that, and capture it."""
        before = self.tokens.clone(), self.cache.seq_lens.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode()
        torch.cuda.current_stream().wait_stream(side)
        self.tokens.copy_(before[0])
        self.cache.seq_lens.copy_(before[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph

    def _plan(self) -> Any:
        """What the kernels of a step want to know of its lengths, from the device's numbers; None for plain torch."""
        if self.plan is not None:
            return self.plan.update(self.cache.seq_lens)
        config = self.config
        if config.positional == "decoupled" or config.caches_values_only or not flash.available(self.device):
            return None
        keys = self.cache.pools[0]
        return flash.plan_decode(
            self.cache.seq_lens,
            S=1,
            max_len=self.cache.pages_per_sequence * self.cache.page,
            H=config.num_attention_heads,
            G=keys.shape[-2],
            d_h=keys.shape[-1],
            dtype=keys.dtype,
            page=self.cache.page,
        )

    def _make_plan(self) -> Any:
        """A plan of our kernel, where that runs."""
        if self.config.positional != "decoupled" or self.device.type != "cuda":
            return None
        values = self.cache.layer(0)[0]
        return ops.plan_decode(
            self.cache.seq_lens,
            H=self.config.num_attention_heads,
            G=values.shape[-2],
            d_h=values.shape[-1],
            d_r=self.config.rope_dim,
            page=self.cache.page,
            dtype=self.model.lm_head.weight.dtype,
            value_dtype=values.dtype,
            row_stride=values.stride(1),
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page)

    def _admit(self, waiting: deque, running: dict[int, list[int]], budget: int) -> dict[int, int]:
        """Prefill as many waiting prompts as there are slots and pages for; their first tokens by slot.

        A sequence is admitted only if all the pages it may come to need are there, so none is ever thrown out.
        """
        chosen: list[tuple[int, list[int]]] = []
        for slot in range(self.cache.batch):
            if not waiting or slot in running:
                continue
            number, prompt = waiting[0]
            needed = self._pages(len(prompt) + budget)
            if needed > self.cache.pages - sum(promised for _, _, promised in running.values()):
                break
            waiting.popleft()
            running[slot] = [number, budget, needed]
            chosen.append((slot, prompt))
        if not chosen:
            return {}
        self.prefill([slot for slot, _ in chosen], [prompt for _, prompt in chosen])
        tokens = self.tokens[:, 0].tolist()
        return {slot: tokens[slot] for slot, _ in chosen}

    def _deliver(
        self, tokens: dict[int, int], running: dict[int, list[int]], end: int | None
    ) -> Iterator[tuple[int, int]]:
        for slot, token in tokens.items():
            number, left, _ = running[slot]
            running[slot][1] = left - 1
            if left == 1 or token == end:
                self._end(slot, running)
            yield number, token

    def _reserve(self, running: dict[int, list[int]]) -> None:
        self.cache.reserve([int(slot in running) for slot in range(self.cache.batch)])

    def _end(self, slot: int, running: dict[int, list[int]]) -> None:
        del running[slot]
        self.cache.release(slot)
        self.active[slot] = 0
