"""State of the data themselves: what of a loader's data has one, and that of the copies that worker processes have.

A worker has its own generators and its own copy of the dataset.  Both are sent along with each batch that it makes
(``Stamp``), are known by worker from then on, and are what the workers of a later iterator begin with (``Init``).
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_resilience import run_state
from lightning_resilience.held_generators import has_state, held_by

MOST_DATASETS = 64
"""Datasets in one up to which generators are looked for in each of them."""

_TRANSFORMS = ("transform", "target_transform", "transforms")


def parts(dataset: Any, collate: Any) -> dict[str, Any]:
    """What has a state of its own in a loader's data: the dataset, one it is a part of, their transforms, the collate
    function, and the random generators that these hold."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left = deque([("dataset", dataset, False)])
    while left:
        name, inner, is_one_of_many = left.popleft()
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        transforms = {f"{name}.{kind}": getattr(inner, kind, None) for kind in _TRANSFORMS}
        # What they hold is looked for anew with each batch, because they may get another one.
        found |= {
            place: one for place, one in {name: inner, **transforms}.items() if not is_one_of_many or has_state(one)
        }
        left.append((f"{name}.dataset", getattr(inner, "dataset", None), is_one_of_many))
        several = getattr(inner, "datasets", None)  # of a ConcatDataset
        if isinstance(several, (list, tuple)):
            is_one_of_many = is_one_of_many or len(several) > MOST_DATASETS
            left += [(f"{name}.{i}", one, is_one_of_many) for i, one in enumerate(several)]
    found["collate_fn"] = getattr(collate, "inner", collate)
    return with_generators(found)


def with_generators(things: dict[str, Any]) -> dict[str, Any]:
    """Of so many objects those that have a state, and the generators that the others hold, each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, thing in things.items():
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if has_state(thing):
            found[name] = thing
            continue
        for path, held in held_by(thing).items():
            if id(held.generator) not in seen:
                seen.add(id(held.generator))
                found[name + path] = held
    return found


def first_part(workers: dict[int, bytes], name: str) -> bool:
    """Whether the workers' copies of a part had a state."""
    return any(name in pickle.loads(state)["parts"] for state in itertools.islice(workers.values(), 1))


def states_of(stateful: dict[str, Any]) -> dict[str, Any]:
    """The state of each part."""
    return {name: part.state_dict() for name, part in stateful.items()}


def restore_states(stateful: dict[str, Any], states: dict[str, Any]) -> None:
    """Give each part its state back; one that has none saved keeps what it has."""
    for name, part in stateful.items():
        if name in states:
            part.load_state_dict(states[name])


# -- in worker processes ----------------------------------------------------------------------------------------------


class Stamped:
    """A batch, and the generators of the worker that made it as they were then."""

    def __init__(self, batch: Any, worker: int, generators: bytes) -> None:
        self.batch = batch
        self.worker = worker
        self.generators = generators

    def pin_memory(self, device: Any = None) -> Stamped:
        """Called by the loader's pinning thread."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return self


class Stamp:
    """A collate function that adds the worker's generators."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.inner = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        state = {"process": run_state.capture(cuda=False), "parts": states_of(parts(worker.dataset, self.inner))}
        return Stamped(batch, worker.id, pickle.dumps(state))


class Init:
    """A worker's initialisation, after which its generators and its copy of the data are as they were."""

    def __init__(self, init: Callable[[int], None] | None, collate: Any, states: dict[int, bytes]) -> None:
        self._init = init
        self._collate = collate
        self._states = states

    def __call__(self, number: int) -> None:
        if self._init is not None:
            self._init(number)
        worker = get_worker_info()
        if worker is not None and number in self._states:
            state = pickle.loads(self._states[number])
            restore_states(parts(worker.dataset, self._collate), state["parts"])
            run_state.restore(state["process"])


@contextmanager
def first_worker(number: int) -> Iterator[None]:
    """While an iterator is made: let worker ``number`` have its first batch, as it would have had without the
    interruption."""
    if not number:
        yield
        return
    original = _MultiProcessingDataLoaderIter._try_put_index

    def try_put_index(self: Any) -> Any:
        _MultiProcessingDataLoaderIter._try_put_index = original  # type: ignore[method-assign]
        for _ in range(number):
            next(self._worker_queue_idx_cycle)
        return original(self)

    _MultiProcessingDataLoaderIter._try_put_index = try_put_index  # type: ignore[method-assign]
    try:
        yield
    finally:
        _MultiProcessingDataLoaderIter._try_put_index = original  # type: ignore[method-assign]
