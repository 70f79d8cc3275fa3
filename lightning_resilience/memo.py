"""What was made last, kept for as long as what it was made from is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """The last result of a function, and what it depended on."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], T] | None = None

    def get(self, of: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result for ``of``: the same object as before where that is equal to what it was before.

        Args:
            of: all that the result depends on: names, numbers, ids of what is referred to elsewhere; never tensors,
                whose memory would be kept.
            make: gives the result.
        """
        if self._known is None or self._known[0] != of:
            self._known = of, make()
        return self._known[1]
