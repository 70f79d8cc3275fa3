"""Random generators that the user's own objects hold: a sampler's ``self.rng``, an augmentation's ``random.Random``.

They are found where such objects have them, as attributes, in small lists, and one object further in, and are then
something with a state like any other.  What has a ``state_dict`` of its own says itself what belongs to it, and is not
looked into.  The generators of the process itself are ``run_state``'s, whoever refers to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience import run_state

DEPTH = 2
"""Objects between the first and a generator, the first included."""
LONGEST = 16
"""Items of a list that is looked through; longer ones are data."""

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_OF_THE_PROCESS = (
    random.getstate.__self__,  # type: ignore[attr-defined]
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    torch.default_generator,
)
_OPAQUE = (
    torch.nn.Module,
    torch.Tensor,
    np.ndarray,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    str,
    int,
    float,
)


def has_state(thing: object) -> bool:
    """Whether something can be saved and restored by itself."""
    try:
        return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    except Exception:  # a mapping whose ``__getattr__`` is its ``__getitem__`` says KeyError, others anything
        return False


class HeldGenerator:
    """One generator, as something with a state."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Its state, in plain values and tensors, and what kind it is."""
        generator = self.generator
        if isinstance(generator, random.Random):
            return {"kind": self._kind, "state": generator.getstate()}
        if isinstance(generator, torch.Generator):
            return {"kind": self._kind, "state": generator.get_state()}
        if isinstance(generator, np.random.Generator):
            return {"kind": self._kind, "state": run_state.plain(generator.bit_generator.state)}
        return {"kind": self._kind, "state": run_state.plain(generator.get_state(legacy=False))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where it was; one of another kind does not, and a warning says so."""
        generator, state = self.generator, saved["state"]
        if saved["kind"] != self._kind:
            rank_zero_warn(
                f"A random generator of the data was a {saved['kind']} and is a {self._kind} now: its numbers do not"
                " go on."
            )
        elif isinstance(generator, random.Random):
            version, internal, gauss_next = state
            generator.setstate((version, tuple(internal), gauss_next))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)

    @property
    def _kind(self) -> str:
        if isinstance(self.generator, torch.Generator):
            return f"Generator of {self.generator.device.type}"
        inner = getattr(self.generator, "bit_generator", None) or getattr(self.generator, "_bit_generator", None)
        return type(self.generator).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")


def held_by(thing: Any) -> dict[str, HeldGenerator]:
    """The generators that an object holds, each once, by where they are."""
    found: dict[int, tuple[str, Any]] = {}
    for path, generator in _walk(thing, "", DEPTH):
        is_own_kind = isinstance(generator, random.Random) and type(generator).getstate is not random.Random.getstate
        if not is_own_kind and not any(generator is one for one in _OF_THE_PROCESS):
            found.setdefault(id(generator), (path, generator))
    return {path: HeldGenerator(generator) for path, generator in found.values()}


def _walk(thing: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, _OPAQUE) or has_state(thing):
        return
    for name, value in _attributes(thing).items():
        few = value if isinstance(value, (list, tuple)) and len(value) <= LONGEST else (value,)
        for number, one in enumerate(few):
            here = f"{path}.{name}" if few is not value else f"{path}.{name}.{number}"
            if isinstance(one, _GENERATORS):
                yield here, one
            elif depth > 1:
                yield from _walk(one, here, depth - 1)


def _attributes(thing: Any) -> dict[str, Any]:
    """What an object refers to by name; of a partial function, what it is given."""
    try:
        own = dict(vars(thing))
    except Exception:  # has none, or answers as ``has_state`` fears
        return {}
    return {**own, "args": thing.args, **thing.keywords} if isinstance(thing, partial) else own
