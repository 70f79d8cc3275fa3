"""The plan that saves follow: which rank writes what and where it lies, made once and used as long as it holds.

::

    prepare (each rank for itself)   does the plan still hold for the state as it is now?
    replan  (all ranks together)     share the state out anew, lay out this rank's part, allocate its slots
    finish  (behind the training)    map the slots' memory, describe the plan for ``.metadata``

It is kept until a *fingerprint* (names, kinds, dtypes, shapes, placements, tied storages) changes on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.distributed.checkpoint.planner import WriteItem

from lightning_resilience.flat import FlatState, Outline, State
from lightning_resilience.inventory import LocalPlan, Share, heard, pieces_of, plan_locally, tell
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.record import metadata_bytes
from lightning_resilience.saveable import check_saveable
from lightning_resilience.shards import Layout, lay_out
from lightning_resilience.sharing import GlobalPlan, share_out
from lightning_resilience.slots import Slot, SlotMemory, dump_objects

Fingerprint = tuple[Any, ...]


@dataclass
class Plan:
    """What holds until the shape of the state changes on any rank."""

    fingerprint: Fingerprint
    layout: Layout
    undescribed: Callable[[], bytes] | None
    slots: list[Slot]
    trained: frozenset[str]
    turn: int = 0
    _metadata: bytes = b""

    def metadata(self) -> bytes:
        """Content of ``.metadata``, made when it is first asked for, by the one thread that asks: with many tensors it
        takes longer than all the rest."""
        if self.undescribed is not None:
            self._metadata, self.undescribed = self.undescribed(), None
        return self._metadata

    def next_slot(self) -> Slot:
        """The one that is not being written out."""
        self.turn += 1
        return self.slots[self.turn % len(self.slots)]

    def close(self, *, keep: bool = False) -> None:
        """Give the slots back; or ``keep`` their files for the process after this one."""
        for slot in self.slots:
            slot.close(keep=keep)


@dataclass
class Prepared:
    """This rank's state, flattened, and its pickled objects where the plan has room for them."""

    flat: FlatState
    identical: frozenset[str]
    fingerprint: Fingerprint
    objects: dict[str, bytes] | None


class Planner:
    """The current plan of one rank, and the memory of its slots.

    Args:
        ranks: the ranks that save together.
        memory: where slots are; see ``SlotMemory``.
    """

    def __init__(self, ranks: Ranks, memory: Any = "auto") -> None:
        self._ranks = ranks
        self._memory = SlotMemory(memory, ranks.rank)
        self.plan: Plan | None = None
        self._outline: Outline | None = None  # of the state that was prepared last
        self._unmapped: Slot | None = None  # the slot of the second save, whose pages the first one's thread maps

    def belong_to(self, run: str) -> None:
        """Let what a kill leaves in memory be found by the next start of a run; see ``SlotMemory.belong_to``."""
        self._memory.belong_to(run)

    def prepare(self, state: State, identical: Callable[[FlatState], Collection[str]]) -> Prepared:
        """What can be done before the ranks know whether the plan still holds; no objects where it does not for this
        one.

        Args:
            state: nested tensors and objects; this rank's part.
            identical: gives the keys of plain tensors that all ranks hold bit for bit.

        Raises:
            SaveFailed: there is something in it that cannot be saved.
        """
        flat = FlatState.of(state, self._outline)
        self._outline = flat.outline
        try:
            alike = frozenset(identical(flat))
            fingerprint = (flat.fingerprint(), alike)
        except Exception:
            check_saveable(flat)  # says it in clearer words, if that is why
            raise
        plan = self.plan
        if plan is None or plan.fingerprint != fingerprint:
            check_saveable(flat)
            return Prepared(flat, alike, fingerprint, None)
        return Prepared(flat, alike, fingerprint, dump_objects(plan.layout, flat))

    def replan(self, prepared: Prepared, trained: Callable[[FlatState], Collection[str]]) -> Plan:
        """Share the state out anew and lay out this rank's part.  Collective; fails on all ranks or on none.

        Args:
            prepared: the state; its objects are not used any more.
            trained: gives the keys of the parameters.
        """
        self._drop()
        prepared.objects = None
        flat = prepared.flat
        items, share, whole = self._share(flat, prepared.identical)

        laid = attempt(lambda: self._allocate(lay_out(pieces_of(items, share), flat), flat.is_on_cuda()))
        everyone = self._ranks.gather(laid if isinstance(laid, BaseException) else np.array(laid[0].extents, np.int64))
        failed = [entry for entry in everyone or () if isinstance(entry, BaseException)]
        failure = self._ranks.broadcast(failed[0] if failed else None)
        if failure is not None:
            if not isinstance(laid, BaseException):
                for slot in laid[1]:
                    slot.close()
            raise failure
        assert not isinstance(laid, BaseException)
        layout, slots = laid
        extents = [entry for entry in everyone or () if not isinstance(entry, BaseException)]
        describe = partial(metadata_bytes, whole, extents) if whole is not None else None
        self.plan = Plan(prepared.fingerprint, layout, describe, slots, frozenset(trained(flat)))
        self._unmapped = slots[0]
        return self.plan

    def _share(self, flat: FlatState, identical: Collection[str]) -> tuple[list[WriteItem], Share, GlobalPlan | None]:
        """What this rank could write, and what it gets to write; on rank 0 also what all get."""
        local = attempt(lambda: plan_locally(flat, identical))
        digests = self._ranks.all_gather(local if isinstance(local, BaseException) else local.holding.inventory.digest)
        raise_first(digests)
        assert isinstance(local, LocalPlan)
        told = self._ranks.gather(tell(local.holding, digests, self._ranks.rank))
        whole = attempt(lambda: share_out(heard(digests, told))) if told is not None else None
        share = self._ranks.scatter(_for_each(whole, self._ranks.world_size))
        if isinstance(share, BaseException):
            raise share
        assert not isinstance(whole, BaseException)
        return local.items, share, whole

    def _allocate(self, layout: Layout, on_cuda: bool) -> tuple[Layout, list[Slot]]:
        slots = self._memory.allocate(layout)
        if on_cuda:
            for slot in slots:
                slot.pin()
        return layout, slots

    def map_rest(self) -> None:
        """Map the memory that no save has touched yet.  On the thread behind the training."""
        if self._unmapped is not None:
            self._unmapped.populate()
            self._unmapped = None

    def finish(self, plan: Plan) -> None:
        """Do what would make the first save slow.  On the thread behind the training."""
        self.map_rest()
        plan.metadata()

    def close(self, *, keep_memory: bool = False) -> None:
        """Give all memory back, or let the process after this one find it."""
        self._drop(keep=keep_memory)
        self._memory.close(keep=keep_memory)

    def _drop(self, *, keep: bool = False) -> None:
        if self.plan is not None:
            self.plan.close(keep=keep)
            self.plan = None


def _for_each(whole: GlobalPlan | BaseException | None, world_size: int) -> list[Any] | None:
    """What each rank is told of the plan, or why there is none."""
    if whole is None:
        return None
    return [whole] * world_size if isinstance(whole, BaseException) else list(whole.shares)
