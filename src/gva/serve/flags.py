"""The flags of `vllm serve` as a person gives them: words, and the file named by --config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHORTEST = len("--h")  # what is as short stands for several flags of vLLM, which refuses it
# With a part or a value at once, too: -cc.mode=3, -O3.
SHORT = {"-cc": "compilation-config", "-O": "compilation-config", "-tp": "tensor-parallel-size"}


@dataclass(frozen=True)
class Flags:
    """Names are vLLM's, with hyphens. A word wins over the file; it may be cut short where vLLM would understand it."""

    words: list[str]
    file: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, words: list[str]) -> "Flags":
        return cls(words, _from_file(cls(words).value("config")))

    def value(self, name: str) -> str | None:
        """The last value of a flag, as --name VALUE or --name=VALUE, else the file's."""
        found = self.file.get(name)
        for word, following in zip(self.words, [*self.words[1:], ""], strict=False):
            if _is(word, name):
                _, equals, value = word.partition("=")
                found = value if equals else following
        return None if found is None else str(found)

    def has(self, name: str) -> bool:
        """Whether anything is said of a flag, or of a part of it, as --name.part VALUE."""
        return name in self.file or any(_is(word, name) for word in self.words)


def _is(word: str, name: str) -> bool:
    given = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if not given.startswith("--"):
        return any(word.startswith(short) for short, stands_for in SHORT.items() if stands_for == name)
    return len(given) > SHORTEST and f"--{name}".startswith(given)


def _from_file(path: str | None) -> dict[str, Any]:
    import yaml  # transformers, and vLLM, need it too

    if path is None or not Path(path).is_file():
        return {}
    content = yaml.safe_load(Path(path).read_text())
    return {str(name).replace("_", "-"): value for name, value in content.items()} if isinstance(content, dict) else {}
