"""The training loss on its way from the device to the schedule, without making either wait.

On a GPU each loss is copied into pinned memory behind the work that computes it, and read some batches later, once an
event says that the copy has landed.  Nothing is synchronised: where the copies have not landed, the losses come later
still.  On a CPU the loss is there already.  Either way losses are handed on several at a time, which costs a step less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TOGETHER = 16
"""Losses that are handed on at once; fewer where they come slowly."""
SECONDS = 0.25
"""Seconds after which they are handed on, however few they are."""
SLOTS = 128
"""Losses that may be on their way.  Where they land more slowly than that, some are left out."""


class LossStream:
    """The losses of one training loop, in order.

    Args:
        name: of the loss in what ``training_step`` returns.
    """

    def __init__(self, name: str = "loss") -> None:
        self._name = name
        self._here: deque[tuple[Tensor | float, int]] = deque()
        self._under_way: deque[tuple[int, torch.cuda.Event, int]] = deque()
        self._pinned: Tensor | None = None
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        self._look_at = -math.inf

    def put(self, outputs: Any, step: int) -> bool:
        """What a ``training_step`` returned, as Lightning gives it to ``on_train_batch_end``, with the weights of
        ``step``; whether a loss is in it."""
        loss = outputs.get(self._name) if type(outputs) is dict or isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                return False
            loss = loss.detach() if loss.requires_grad else loss
            if isinstance(loss, DTensor):
                if not all(placement.is_replicate() for placement in loss.placements):
                    return False  # this rank has a part of it, and the ranks would have to meet for the rest
                loss = loss.to_local()
            if loss.is_cuda:
                self._send(loss, step)
            elif not loss.is_meta:
                self._here.append((loss, step))
            return True
        if isinstance(loss, (int, float)):
            self._here.append((loss, step))
            return True
        return False

    def _send(self, loss: Tensor, step: int) -> None:
        if self._pinned is None:
            self._pinned = torch.empty(SLOTS, dtype=torch.float32, device="cpu", pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        if len(self._under_way) == SLOTS:
            return
        slot, self._next = self._next, (self._next + 1) % SLOTS
        # Converted on the device: a copy that converts on its way would have to be waited for.
        self._pinned[slot].copy_(loss.reshape(()).to(torch.float32), non_blocking=True)
        event = self._events[slot]
        event.record(torch.cuda.current_stream(loss.device))
        self._under_way.append((slot, event, step))

    def take(self, now: float) -> list[tuple[float, int]]:
        """The losses that have arrived since the last call, from old to new, each with its step; or none yet.

        Args:
            now: seconds of a monotonic clock.
        """
        if now < self._look_at and len(self._here) < TOGETHER and len(self._under_way) < TOGETHER:
            return []
        self._look_at = now + SECONDS
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._land()
        return self._hand_on()

    def take_all(self) -> list[tuple[float, int]]:
        """The losses up to now; waits for those that are under way.  For a save, which waits for the device anyway."""
        if self._under_way:
            self._under_way[-1][1].synchronize()
        while self._under_way:
            self._land()
        return self._hand_on()

    def _land(self) -> None:
        slot, _, step = self._under_way.popleft()
        assert self._pinned is not None
        self._here.append((float(self._pinned[slot]), step))

    def _hand_on(self) -> list[tuple[float, int]]:
        arrived = [(float(loss), step) for loss, step in self._here]
        self._here.clear()
        return arrived
