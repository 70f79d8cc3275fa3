"""Content in parts: which are asked for, and whose error reaches whom."""

from __future__ import annotations

import pytest

from lightning_resilience import transfer
from lightning_resilience.errors import CheckpointCorrupt, TierUnavailable
from lightning_resilience.transfer import Checked, OfTheCaller, Stat, Write, check_size, in_parts, part_size


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, (10, 4)),
        (10, (10, 4)),
        (50, (10, 4)),
        (51, (11, 3)),
        (500, (100, 1)),
    ],
)
def test_parts_grow_where_there_would_be_too_many_and_fewer_are_under_way_then(
    monkeypatch: pytest.MonkeyPatch, size: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(transfer, "PART", 10)
    monkeypatch.setattr(transfer, "MEMORY", 40)
    monkeypatch.setattr(transfer, "MOST_PARTS", 5)
    assert part_size(size) == expected


@pytest.mark.parametrize(
    ("size", "parts"), [(0, []), (1, [(0, 1)]), (10, [(0, 10)]), (25, [(0, 10), (10, 20), (20, 25)])]
)
def test_each_byte_is_fetched_once(monkeypatch: pytest.MonkeyPatch, size: int, parts: list[tuple[int, int]]) -> None:
    monkeypatch.setattr(transfer, "PART", 10)
    asked, pieces = [], {}

    def read_part(start: int, stop: int, write: Write) -> None:
        asked.append((start, stop))
        write(start, bytes(stop - start))

    in_parts(size, pieces.__setitem__, read_part)
    assert sorted(asked) == parts
    assert {start: len(piece) for start, piece in pieces.items()} == {start: stop - start for start, stop in parts}


def test_the_callers_error_passes_what_translates_the_stores() -> None:
    def full(start: int, piece: bytes) -> None:
        raise OSError("disk is full")

    def read_part(start: int, stop: int, write: Write) -> None:
        try:
            write(start, bytes(stop - start))
        except OfTheCaller:
            raise
        except Exception as error:
            raise TierUnavailable("the store is away") from error

    with pytest.raises(OSError, match="disk is full"):
        in_parts(10, full, read_part)


@pytest.mark.parametrize(
    ("found", "said"), [(None, "is not there"), (Stat(3), "has 3 bytes of 1,000"), (Stat(1000, "other"), None)]
)
def test_what_was_sent_has_to_be_there_at_its_size(found: Stat | None, said: str | None) -> None:
    if said is None:
        check_size("a", found, 1000)
        return
    with pytest.raises(TierUnavailable, match=said):
        check_size("a", found, 1000)


def test_content_that_is_shorter_than_it_was_is_corrupt() -> None:
    with pytest.raises(CheckpointCorrupt, match="shorter"):
        Checked("a", lambda start, length: bytes(length - 1), "digest")(0, 10)
