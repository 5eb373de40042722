"""Generation on a paged cache for one device: prompts of any lengths, sequences that come and go.

Prefill runs the expanded form and writes pages. The decode step is one function of buffers that stay where they
are, so on a GPU it is captured once as a CUDA graph and replayed at every later length.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from gva import ops
from gva.attention import Attention, Query, Row
from gva.attention.rope import Turns
from gva.errors import check
from gva.ops import flash
from gva.ops.dense import Spans
from gva.paged.attend import Absorbed, Expanded, Gathered, InPlace, Stretch, attend, slots_of, together
from gva.paged.cache import OutOfPages, PagedCache
from gva.paged.pages import pages_of
from gva.paged.sampling import Sampler
from gva.paged.text import Prompt, continuation, listed, tokens_of

End = int | Iterable[int] | None


@dataclass
class PagedStep:
    """One forward pass of new tokens, [N] of all sequences, on a paged cache: the `attend` of its layers.

    slots      [N] where the new tokens go, -1 for padding
    row, pools of the layer that it is handed to; not the number of a layer, so that all compile to one graph
    """

    cache: PagedCache
    slots: Tensor
    stretches: Sequence[Stretch]
    row: Row | None = None
    pools: list[Tensor] = field(default_factory=list)

    def of_layer(self, index: int) -> "PagedStep":
        return replace(self, row=self.cache.rows[index], pools=self.cache.pools[index])

    def __call__(self, attention: Attention, query: Query, row: Any) -> tuple[Tensor, None]:
        out = query.content.new_empty(*query.content.shape[:2], attention.config.value_head_dim)
        assert self.row is not None
        pages = pages_of(self.row, self.pools, self.cache.dtype)
        attend(attention, pages, query, row, self.slots, self.stretches, out)
        return out, None


def run_layer(layer: Any, hidden: Tensor, rotation: Any, step: PagedStep) -> Tensor:
    return layer(hidden, rotation, step)


def ends_of(model: Any, tokenizer: Any = None) -> frozenset[int]:
    """The tokens that end a sequence: of the model's generation_config, else its config, else the tokenizer."""
    for says in (getattr(model, "generation_config", None), model.config, tokenizer):
        end = getattr(says, "eos_token_id", None)
        if end is not None:
            return frozenset((end,) if isinstance(end, int) else end)
    return frozenset()


class PagedGenerator:
    """Decodes up to `batch` sequences at a time with a GvaForCausalLM of any variant.

    `tokenizer`: of transformers; with one, prompts may be strings, and are answered by strings.
    `temperature` 0 is greedy; `top_k`, `top_p` and `seed` are for other temperatures (`gva.paged.sampling`). A prompt's
    tokens follow from the seed and its number, whatever else is decoded beside it.
    `fp8` caches values in e4m3. `cuda_graph` None: on a GPU.
    `prefill_tokens`: how many tokens of prompts one forward pass takes; longer prompts take several.
    `layout`: how pages hold a token (`PagedCache`).
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
        layout: str | None = None,
        tokenizer: Any = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        cuda_graph: bool | None = None,
        prefill_tokens: int = 16384,
        compile: bool = False,
    ) -> None:
        self.sampler = Sampler(temperature, top_k, top_p, seed)
        check(prefill_tokens > 0, "prefill_tokens", prefill_tokens, "must be positive")
        self.prefill_tokens = prefill_tokens
        ours = hasattr(getattr(model, "config", None), "layer_configs")
        check(ours, "model", type(model).__name__, "must be a GvaForCausalLM; gva import makes one of a Llama's folder")
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.ends = ends_of(model, tokenizer)
        weight = model.lm_head.weight
        self.cache = PagedCache(
            model.config, batch, max_tokens, page=page, pages=pages, dtype=weight.dtype, fp8=fp8, layout=layout,
            device=weight.device,
        )  # fmt: skip
        self.device, self.max_tokens = weight.device, max_tokens
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.active = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.keys = torch.zeros(batch, dtype=torch.long, device=self.device)  # of the sampler
        # One set of frequencies on the device, which a captured step reads.
        self.layers = model.config.layer_configs
        self.turns = Turns(self.layers, self.device, weight.dtype)
        self.plans = self._make_plans()
        self.use_graph = self.device.type == "cuda" if cuda_graph is None else cuda_graph
        self.graph: Any = None
        self._compiled_layer = torch.compile(run_layer, fullgraph=True, dynamic=False) if compile else None
        self._streaming = Lock()  # pages and buffers are one stream's at a time

    def generate(self, prompts: Iterable[Prompt], max_new_tokens: int, end: End = None) -> list[Any]:
        """What each prompt is continued with, in their order: new tokens, the end token last if it came; of a string
        the text that follows it, the end left out. `end` as in `stream`."""
        prompts = listed(prompts)
        ids = [self.encode(prompt) for prompt in prompts]
        results: list[Any] = [[] for _ in ids]
        ends = self._ends(end)
        for number, token in self.stream(ids, max_new_tokens, ends):
            results[number].append(token)
        for number, (prompt, tokens) in enumerate(zip(prompts, results, strict=True)):
            if isinstance(prompt, str):
                said = tokens[:-1] if tokens[-1] in ends else tokens
                results[number] = continuation(self.tokenizer, ids[number], said)
        return results

    def encode(self, prompt: Prompt) -> list[int]:
        return tokens_of(prompt, self.tokenizer, self.config.vocab_size)

    def _ends(self, end: End) -> frozenset[int]:
        if end is None:
            return self.ends
        return frozenset((end,) if isinstance(end, int) else end)

    @torch.no_grad()
    def stream(self, prompts: Iterable[Prompt], max_new_tokens: int, end: End = None) -> Iterator[tuple[int, int]]:
        """(number of the prompt, token) as they come. A sequence that ends makes room for the next prompt.

        `end`: the token, or tokens, that end a sequence; None: the model's own, () for none.
        One stream at a time: a second one is refused until the first has ended or was closed."""
        check(max_new_tokens > 0, "max_new_tokens", max_new_tokens, "must be positive")
        ends, waiting = self._ends(end), deque(enumerate(map(self.encode, listed(prompts))))
        for number, prompt in waiting:
            check(len(prompt) > 0, f"prompt {number}", prompt, "must have at least one token")
            total, limit = len(prompt) + max_new_tokens, self.max_tokens
            check(total <= limit, f"prompt {number}", total, f"tokens, the new ones counted, exceed max_tokens={limit}")
            if self._pages(total) > self.cache.pages:
                raise OutOfPages(f"prompt {number} needs {self._pages(total)} pages, the cache has {self.cache.pages}")
        if not self._streaming.acquire(blocking=False):
            raise RuntimeError(
                "this PagedGenerator is in the middle of a stream, whose pages another one would write over; read it "
                "to its end or close() it, give all prompts to one call, or make a generator for each"
            )
        running: dict[int, list[int]] = {}  # sequence -> [number of the prompt, tokens still to come, pages promised]
        try:
            while waiting or running:
                first = self._admit(waiting, running, max_new_tokens)
                yield from self._deliver(first, running, ends)
                if not running:
                    continue
                self._reserve(running)
                self.step()
                tokens = self.tokens.tolist()
                yield from self._deliver({sequence: tokens[sequence] for sequence in running}, running, ends)
        finally:
            for sequence in list(running):
                self._end(sequence, running)
            self._streaming.release()

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
    def prefill(self, sequences: list[int], prompts: list[list[int]], numbers: list[int] | None = None) -> None:
        """Begin these sequences; their first new tokens are then in `tokens`. `numbers` of the prompts, if they are
        others than those of the sequences: what each draws follows from its own."""
        own = torch.tensor(sequences, device=self.device)
        self.keys[own] = self.sampler.keys(numbers or sequences, self.device)
        counts = [0] * self.cache.batch
        for sequence, prompt in zip(sequences, prompts, strict=True):
            counts[sequence] = len(prompt)
        self.cache.reserve(counts)
        for pieces in self._passes(prompts):
            self._prefill(sequences, prompts, pieces)
        self.cache.advance(counts)
        self.active[own] = 1

    def _passes(self, prompts: list[list[int]]) -> Iterator[list[tuple[int, int, int]]]:
        """What goes through the model together, `prefill_tokens` at most: (which prompt, its first and last token)."""
        pieces, room = [], self.prefill_tokens
        for number, prompt in enumerate(prompts):
            start = 0
            while start < len(prompt):
                count = min(room, len(prompt) - start)
                pieces.append((number, start, start + count))
                start, room = start + count, room - count
                if room == 0:
                    yield pieces
                    pieces, room = [], self.prefill_tokens
        if pieces:
            yield pieces

    def _prefill(self, sequences: list[int], prompts: list[list[int]], pieces: list[tuple[int, int, int]]) -> None:
        """One pass over pieces of prompts, which attend to what is cached of theirs."""
        tokens = torch.tensor([t for number, a, b in pieces for t in prompts[number][a:b]], device=self.device)
        positions = torch.tensor([at for _, a, b in pieces for at in range(a, b)], device=self.device)
        own = torch.tensor([sequences[number] for number, _, _ in pieces], device=self.device)
        counts = [b - a for _, a, b in pieces]
        owner = torch.repeat_interleave(own, torch.tensor(counts, device=self.device), output_size=len(tokens))
        stretches = [self._expanded(own, pieces, first, last) for first, last in together([b for _, _, b in pieces])]
        step = PagedStep(self.cache, self.cache.slots(positions, owner), stretches)
        hidden = self._layers(tokens, positions, [step] * len(self.layers))
        ends = list(accumulate(counts))
        ending = [i for i, (number, _, b) in enumerate(pieces) if b == len(prompts[number])]
        if ending:
            last_rows = hidden[torch.tensor([ends[i] - 1 for i in ending], device=self.device)]
            lengths = torch.tensor([pieces[i][2] for i in ending], device=self.device)
            logits, chosen = self.model.lm_head(last_rows), own[ending]
            self.tokens[chosen] = self.sampler.choose(logits, self.keys[chosen], lengths)

    def _expanded(self, own: Tensor, pieces: list[tuple[int, int, int]], first: int, last: int) -> Expanded:
        """The stretch of pieces `first` to `last`; `own` are the sequences of all pieces."""
        before = sum(b - a for _, a, b in pieces[:first])
        chosen = pieces[first:last]
        queries, keys = self._spans([b - a for _, a, b in chosen]), self._spans([b for _, _, b in chosen])
        cached = any(a > 0 for _, a, _ in chosen)
        slots = slots_of(self.cache.block_table[own[first:last]], keys, self.cache.page) if cached else None
        return Expanded(slice(before, before + queries.starts[-1]), queries, keys, slots)

    def _spans(self, counts: list[int]) -> Spans:
        starts = list(accumulate(counts, initial=0))
        return Spans(starts, torch.tensor(starts, dtype=torch.int32, device=self.device))

    def _decode(self) -> None:
        """The captured step: everything it reads or writes keeps its address."""
        cache = self.cache
        positions = torch.where(self.active > 0, cache.seq_lens, -1)
        cache.seq_lens.add_(self.active)
        step = PagedStep(cache, cache.slots(positions), [])
        kinds = [(layer.row, layer.absorbs) for layer in self.layers]
        steps = {kind: replace(step, stretches=[self._decoding(*kind)]) for kind in dict.fromkeys(kinds)}
        run = self._compiled_layer or run_layer
        hidden = self._layers(self.tokens, positions.clamp(min=0), [steps[kind] for kind in kinds], run)
        self.tokens.copy_(self.sampler.choose(self.model.lm_head(hidden), self.keys, cache.seq_lens))

    def _decoding(self, row: Row, absorbs: bool) -> Stretch:
        """How the layers decode that have such a row, and absorb or do not."""
        cache, plan = self.cache, self._plan(row, absorbs)
        if absorbs:
            return Absorbed(slice(0, cache.batch), cache.block_table, cache.seq_lens, None, 1, plan)
        if plan is not None:
            return InPlace(cache.block_table, cache.seq_lens, plan)
        return Gathered(cache.block_table, cache.seq_lens)

    def _layers(self, tokens: Tensor, positions: Tensor, steps: list[PagedStep], run: Any = run_layer) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(tokens)
        rotations = self.turns.tables(positions)
        for index, layer in enumerate(inner.layers):
            hidden = run(layer, hidden, rotations[index], steps[index].of_layer(index))
        return inner.norm(hidden)

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

    def _plan(self, row: Row, absorbs: bool) -> Any:
        """What the kernels of a step want to know of its lengths, from the device's numbers; None for plain torch."""
        if absorbs:
            return self.plans[row].update(self.cache.seq_lens) if row in self.plans else None
        dtype, takes = self.cache.dtype, flash.available(self.device)
        if len(row.content) < 2 or row.rope is not None or not takes or dtype not in (torch.bfloat16, torch.float16):
            return None
        keys = row.content[0]
        return flash.plan_decode(
            self.cache.seq_lens,
            S=1,
            max_len=self.cache.pages_per_sequence * self.cache.page,
            H=self.config.num_attention_heads,
            G=keys.heads,
            d_h=keys.width,
            dtype=dtype,
            page=self.cache.page,
        )

    def _make_plans(self) -> dict[Row, ops.DecodePlan]:
        """A plan of our kernel for each row that layers absorb, where it runs."""
        plans: dict[Row, ops.DecodePlan] = {}
        for index, layer in enumerate(self.layers):
            row = layer.row
            if self.device.type != "cuda" or not layer.absorbs or row in plans or row.rope is None:
                continue
            values = self.cache.layer(index).parts[0]
            plans[row] = ops.plan_decode(
                self.cache.seq_lens,
                H=self.config.num_attention_heads,
                G=values.shape[-2],
                d_h=values.shape[-1],
                d_r=row.rope.width,
                page=self.cache.page,
                dtype=self.cache.dtype,
                value_dtype=values.dtype,
                row_stride=values.stride(1),
            )
        return plans

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page)

    def _admit(self, waiting: deque, running: dict[int, list[int]], budget: int) -> dict[int, int]:
        """Prefill as many waiting prompts as there are sequences and pages free; their first tokens.

        A sequence is admitted only if all the pages it may come to need are there, so none is ever thrown out.
        """
        chosen: list[tuple[int, list[int]]] = []
        for sequence in range(self.cache.batch):
            if not waiting or sequence in running:
                continue
            number, prompt = waiting[0]
            needed = self._pages(len(prompt) + budget)
            if needed > self.cache.pages - sum(promised for _, _, promised in running.values()):
                break
            waiting.popleft()
            running[sequence] = [number, budget, needed]
            chosen.append((sequence, prompt))
        if not chosen:
            return {}
        numbers = [running[sequence][0] for sequence, _ in chosen]
        self.prefill([sequence for sequence, _ in chosen], [prompt for _, prompt in chosen], numbers)
        tokens = self.tokens.tolist()
        return {sequence: tokens[sequence] for sequence, _ in chosen}

    def _deliver(
        self, tokens: dict[int, int], running: dict[int, list[int]], ends: frozenset[int]
    ) -> Iterator[tuple[int, int]]:
        for sequence, token in tokens.items():
            number, left, _ = running[sequence]
            running[sequence][1] = left - 1
            if left == 1 or token in ends:
                self._end(sequence, running)
            yield number, token

    def _reserve(self, running: dict[int, list[int]]) -> None:
        self.cache.reserve([int(sequence in running) for sequence in range(self.cache.batch)])

    def _end(self, sequence: int, running: dict[int, list[int]]) -> None:
        del running[sequence]
        self.cache.release(sequence)
        self.active[sequence] = 0
