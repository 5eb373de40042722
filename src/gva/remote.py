"""What lets transformers load a saved folder in a process that never imported gva: `auto_map` in its config.json, and
the file that this names. `trust_remote_code` runs that file, which finds the classes here."""

import copy
import os
from pathlib import Path
from typing import Any, ClassVar

DISTRIBUTION = "grouped-value-attention"
FILE = "modeling_gva.py"
CLASSES = {"AutoConfig": "GvaConfig", "AutoModel": "GvaModel", "AutoModelForCausalLM": "GvaForCausalLM"}
AUTO_MAP = {auto: f"{FILE.removesuffix('.py')}.{name}" for auto, name in CLASSES.items()}
# The import is guarded, or transformers would look ahead and advise installing what is called gva on the index.
CODE = f'''"""This model's classes are in the Python package gva, which pip knows as {DISTRIBUTION}."""

try:
    from gva.model import {", ".join(CLASSES.values())}
except ImportError as error:
    raise ImportError(
        f"this model needs the Python package gva ({{error}}); install it with: pip install {DISTRIBUTION}"
    ) from error

__all__ = {list(CLASSES.values())}
'''


class Registered:
    """For classes that are this package's own wherever they were found: transformers would copy the source of a class
    that it had loaded by `auto_map` into every folder saved from it."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the folder has `modeling_gva.py`."""


class SavedWithCode(Registered):
    """A config whose folder says where its classes are."""

    auto_map: ClassVar[dict[str, str]] = {}  # of a config itself nothing, for those who ask (TRL) without looking first

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and beside config.json the file that its `auto_map` names."""
        saved: Any = copy.copy(self)
        saved.auto_map = AUTO_MAP
        super(SavedWithCode, saved).save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        (Path(save_directory) / FILE).write_text(CODE)
