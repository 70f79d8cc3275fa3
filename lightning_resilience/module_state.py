"""A module's state dict and the names of its parameters, as torch gives them, for models of many small modules.

torch asks each module through several calls, and makes a new tensor of each of its tensors, which together takes longer
than copying a small one.  Where a module leaves all of that as torch has it, the answer follows from the names of its
parts and the memory of its tensors, which mostly are those of the save before: then so is the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lightning_resilience.flat import PLAIN
from lightning_resilience.saveable import what_else

METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""Of a module, that make its state."""


def modules(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, those that have several names as often; level by level."""
    found, level = [module], [module]
    while level:
        below = list(chain.from_iterable(map(methodcaller("values"), map(attrgetter("_modules"), level))))
        level = below if None not in below else [child for child in below if child is not None]
        found += level
    return found


def parameters(module: nn.Module) -> dict[str, Parameter]:
    """All parameters by name, under each of their names."""
    found: dict[str, Parameter] = {}
    _add_parameters(module, "", found)
    return found


def _add_parameters(module: nn.Module, prefix: str, found: dict[str, Parameter]) -> None:
    own = module.__dict__
    for name, value in own["_parameters"].items():
        if value is not None:
            found[prefix + name] = value
    for name, child in own["_modules"].items():
        if child is not None:
            _add_parameters(child, f"{prefix}{name}.", found)


class ModuleState:
    """The state dict of a module, save after save.

    Attributes:
        parameters: the names of all parameters when it was last asked for, each parameter under all its names.
        trainable: whether each of them was.
        versions: how often torch had counted each to be changed; None where it does not count.
    """

    def __init__(self) -> None:
        self.parameters: list[str] = []
        self.trainable: list[bool] = []
        self.versions: list[int | None] = []
        self._known: _Known | None = None

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """What ``module.state_dict()`` is."""
        walk = _Walk()
        known, self._known = self._known, None
        if not walk.go(module, "") or not walk.is_plain:
            self._note(parameters(module))
            return module.state_dict()
        self._note(walk.parameters)
        if known is None or not known.holds(walk):
            known = None  # it keeps memory that the model may have no more
            if not all(map(_is_comparable, walk.tensors)):
                return module.state_dict()
            known = _Known(walk, module.state_dict())
        self._known = known
        return known.copy()

    def _note(self, found: Mapping[str, Parameter]) -> None:
        """Keep what is asked of parameters, but not those."""
        self.parameters = list(found)
        self.trainable = list(map(attrgetter("requires_grad"), found.values()))
        self.versions = versions_of(found.values())


def versions_of(tensors: Collection[Tensor]) -> list[int | None]:
    """How often torch has counted each tensor to be changed; None where it does not count."""
    try:
        return list(map(attrgetter("_version"), tensors))
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _is_comparable(tensor: Tensor) -> bool:
    """Whether it can be told later if it is as it was."""
    return what_else(tensor) is None and not tensor.is_inference()


class _Walk:
    """One walk through a module and all below it, in torch's order: what its state dict follows from.

    Attributes:
        kinds: the types of the modules.
        prefixes: of the names in each of them.
        names: of the tensors that are saved.
        tensors: those.
        parameters: those of them that are parameters, by name.
    """

    def __init__(self) -> None:
        self.kinds: list[type] = []
        self.prefixes: list[str] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.parameters: dict[str, Parameter] = {}

    def go(self, module: nn.Module, prefix: str) -> bool:
        """Walk on from a module; False where the state of one is not for torch alone to say."""
        own = module.__dict__
        if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"] or "state_dict" in own or METHODS[1] in own:
            return False
        self.kinds.append(type(module))
        self.prefixes.append(prefix)
        for name, value in own["_parameters"].items():
            if value is not None:
                self.parameters[prefix + name] = value
                self.names.append(prefix + name)
                self.tensors.append(value)
        for name, value in own["_buffers"].items():
            if value is not None and name not in own["_non_persistent_buffers_set"]:
                self.names.append(prefix + name)
                self.tensors.append(value)
        for name, child in own["_modules"].items():
            if child is not None and not self.go(child, f"{prefix}{name}."):
                return False
        return True

    @property
    def is_plain(self) -> bool:
        """Whether no class overrides how its state is made, and tensors are nothing but their memory."""
        return (
            all(getattr(kind, name) is getattr(nn.Module, name) for kind in set(self.kinds) for name in METHODS)
            and set(map(type, self.tensors)) <= {*PLAIN}
            and set(map(attrgetter("layout"), self.tensors)) <= {torch.strided}
        )


class _Known:
    """A state dict, and the walk from which it followed."""

    def __init__(self, walk: _Walk, state: dict[str, Any]) -> None:
        self._walk = (walk.kinds, walk.prefixes, list(state))
        self._sources = walk.tensors
        self._state: Any = state
        self._tensors: list[Tensor] = list(state.values())
        self._dtypes = list(map(attrgetter("dtype"), self._tensors))

    def holds(self, walk: _Walk) -> bool:
        """Whether the same follows from another walk: the names are the same, and the tensors are the same objects,
        which count their changes together with ours and refer to the same memory."""
        version = attrgetter("_version")
        return (
            (walk.kinds, walk.prefixes, walk.names) == self._walk
            and all(map(is_, walk.tensors, self._sources))
            and list(map(version, walk.tensors)) == list(map(version, self._tensors))
            and list(map(attrgetter("dtype"), walk.tensors)) == self._dtypes
            and all(map(Tensor.is_set_to, walk.tensors, self._tensors))
        )

    def copy(self) -> dict[str, Any]:
        """The state dict, for whoever gets it to change."""
        copy: Any = OrderedDict(self._state)
        copy._metadata = OrderedDict(self._state._metadata)
        return copy  # type: ignore[no-any-return]
