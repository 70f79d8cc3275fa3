"""Names of tensors in a checkpoint, in a form that is the same whatever wrapped the model when it was saved.

The first component is ``model`` (``ModelParallelStrategy`` writes ``state_dict``), and the names that wrappers insert
(``torch.compile``, activation checkpointing, FSDP) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")

ObjectPath: TypeAlias = tuple[str | int, ...]
"""The names that lead to a value in nested state."""


@lru_cache(None)
def canonical(name: str) -> str:
    """A parameter's name without what wrappers insert."""
    return _WRAPPERS.sub("", name) if "_" in name else name


def canonical_path(path: Iterable[str | int]) -> ObjectPath:
    """A DCP object path in canonical form."""
    first, *rest = path
    return ("model" if first == "state_dict" else first, *(canonical(p) if isinstance(p, str) else p for p in rest))


def key_of(path: Iterable[str | int]) -> str:
    """The flat key of a DCP object path."""
    return ".".join(map(str, path))
