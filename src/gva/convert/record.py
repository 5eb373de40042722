"""What a conversion has found: printed, kept as conversion.json, and a section of the model's card."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gva.config import GvaConfig
from gva.convert import TARGETS
from gva.data.publish import section

SECTION = "conversion"


@dataclass(frozen=True)
class Record:
    """
    asked     the request: source, target, cache, text
    splits    of each layer
    losses    {stage: {text: nats per token}}: of the source, after its rotation was cut, of what was written
    cache     scalars per token and layer before and after, counted on filled caches
    searched  the loss of each split that was tried
    """

    asked: dict[str, Any]
    splits: list[dict[str, int]]
    losses: dict[str, dict[str, float]]
    cache: dict[str, float]
    searched: dict[str, float]
    versions: dict[str, str]

    def written(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: a table in Markdown and two sentences."""
        texts = list(self.losses["source"])
        head = ["", *(f"{text}: loss, perplexity, against the source" for text in texts)]
        rows = [[stage, *(self._cell(stage, text) for text in texts)] for stage in self.losses]
        table = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
        before, after = self.cache["source"], self.cache["converted"]
        widths = sorted({split["slice"] for split in self.splits})
        rotating = f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else str(widths[0])
        return [
            f"A token leaves {after:g} scalars in the cache of a layer instead of {before:g} "
            f"({after / before - 1:+.1%}), of which {rotating} rotate.",
            "",
            *table,
        ]

    def _cell(self, stage: str, text: str) -> str:
        loss, source = self.losses[stage][text], self.losses["source"][text]
        against = "" if stage == "source" else f", {loss - source:+.4f}"
        return f"{loss:.4f}, {math.exp(loss):.2f}{against}"


def card(record: Record, config: GvaConfig) -> str:
    """The model's card. The licence is that of the source, which only its owner knows here."""
    asked = record.asked
    about = "\n".join(record.lines())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- grouped-value-attention
- gva
---

# {asked["source"]["folder"]} with a smaller cache

Converted by `gva convert --to {asked["to"]}` ({TARGETS[asked["to"]]}).
The fingerprint of its source is {asked["source"]["fingerprint"]}; its attention is `{config.attention}`.
It was not trained after that. Its licence is that of the source.

{section(SECTION, about)}

Losses are over text of the calibration and {asked["held_out"]["tokens"]:,} tokens held out of it, in sequences of
{asked["length"]}.

## Load and serve

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)
```

`gva serve path/to/this/folder` serves it with vLLM; `gva train --from path/to/this/folder --teacher SOURCE` heals it.
"""
