"""Slots and devices: what is locked for a device, and what may be copied from it behind the training thread."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_resilience import slots, staging
from lightning_resilience.flat import FlatState
from lightning_resilience.inventory import pieces_of, plan_locally
from lightning_resilience.shards import Layout, lay_out
from lightning_resilience.sharing import share_out
from lightning_resilience.slots import Slot, SlotMemory, dump_objects
from lightning_resilience.staging import Copies, copy_at_once


class Runtime:
    """Stands in for the runtime of CUDA: notes what it is asked, and refuses from the ``refused``-th call on."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.locked: list[tuple[int, int]] = []
        self.forgotten = 0
        self._calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1  # portable: it is locked for all devices
        self._calls += 1
        if self._calls >= self.refused:
            return 2
        self.locked.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked = [one for one in self.locked if one[0] != address]
        return 0

    def forget(self) -> None:
        self.forgotten += 1


def of(state: dict[str, dict[str, torch.Tensor]]) -> tuple[FlatState, Layout]:
    flat = FlatState.of(state)
    local = plan_locally(flat)
    return flat, lay_out(pieces_of(local.items, share_out([local.holding]).shares[0]), flat)


@pytest.mark.parametrize("refused", [1, 99])
def test_a_slot_is_locked_for_cuda_while_it_is_open_or_said_not_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    runtime = Runtime(refused)
    monkeypatch.setattr(slots, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(slots, "forget_cuda_error", runtime.forget)
    flat, layout = of({"model": {"w": torch.ones(3)}})
    (slot,) = SlotMemory(False).allocate(layout, copies=1)
    with caplog.at_level(logging.WARNING):
        slot.pin()
        slot.pin()
    is_refused = refused == 1
    assert sum(size for _, size in runtime.locked) == (0 if is_refused else layout.size)
    assert ("cannot be locked" in caplog.text) == is_refused
    assert runtime.forgotten == (2 if is_refused else 0)  # else the next launch would raise it
    slot.fill(flat, dump_objects(layout, flat) or {})
    slot.close()
    assert runtime.locked == []


def filled_behind(slot: Slot, flat: FlatState, layout: Layout) -> bool:
    later = slot.fill(flat, dump_objects(layout, flat) or {}, later={"model.w"})
    if later is not None:
        later.start()
        assert later.wait(30) is None
    return later is not None


def test_from_devices_that_are_not_known_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be made to wait for a copy, and it could not be known when one is done."""
    flat, layout = of({"model": {"w": torch.ones(2**18)}})
    slot, other = SlotMemory(False).allocate(layout)
    assert filled_behind(slot, flat, layout)
    for module in (slots, staging):
        monkeypatch.setattr(module, "OVERLAPPING", frozenset({"cuda"}))  # the host is such a device now
    assert not filled_behind(other, flat, layout)
    assert bytes(slot.view()) == bytes(other.view())
    slot.close()
    other.close()

    asked: list[bool] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_, non_blocking: asked.append(non_blocking))
    copy_at_once(Copies(["w"], [torch.empty(2)], [torch.ones(2)]))
    assert asked == [False]
