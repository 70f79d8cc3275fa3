"""The ledger of a run folder: what it says of failures, and that nothing it meets on disk can hurt."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from forks import run_fork, start_forks
from lightning_resilience import ledger
from lightning_resilience.ledger import LEDGER, History, Ledger, Record, read, understood
from lightning_resilience.useful import Useful


def live(folder: Path, how: str | None, *, commits: int = 1, step: int = 0, **facts: Any) -> Ledger:
    """A life of 100 seconds a commit, ended as said; None is a kill."""
    book = Ledger(folder)
    useful = Useful(1000.0)
    book.start(useful, step, **facts)
    for number in range(1, commits + 1):
        useful.saved((number, step), 1000.0 + 100 * number, 0.5)
        book.commit(1000.0 + 100 * number, step + 10 * number, 0.5, 3.0)
    if how is None:
        book._lines.put(None)
        assert book._thread is not None
        book._thread.join(10)
    else:
        book.end(1000.0 + 100 * commits, step + 10 * commits, how)
    return book


@pytest.mark.parametrize(
    ("ends", "failures"),
    [
        (["clean"], 0),
        ([None], 1),
        (["exception"], 1),
        (["preempted", "interrupted"], 0),
        ([None, "exception", "clean", None], 3),
    ],
)
def test_only_what_nobody_meant_is_a_failure(tmp_path: Path, ends: list[str | None], failures: int) -> None:
    for how in ends:
        live(tmp_path, how)
    assert read(tmp_path).history() == History(failures, 100.0 * len(ends))
    assert Ledger(tmp_path).history == History(failures, 100.0 * len(ends))


def test_ledger_says_what_goodput_across_restarts_needs(tmp_path: Path) -> None:
    live(tmp_path, None, commits=3, run="r", world_size=4)
    live(tmp_path, "clean", commits=2, step=20)
    first, second = read(tmp_path).lives
    assert (first.last("start")["run"], first.last("start")["world_size"]) == ("r", 4)
    assert (first.how, first.seconds, first.stalled, first.steps) == ("killed", 300.0, 1.5, 30)
    assert (second.how, second.seconds, second.steps) == ("clean", 200.0, 20)
    assert second.last("start")["step"] == 20  # ten of the first life's steps are done again
    assert all(line["time"] > 1e9 for life in (first, second) for line in life.lines)
    assert first.last("beat")["stall"] == 0.5
    assert first.last("beat")["commit"] == 3.0


def test_beats_without_commits_are_written_once_a_minute(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    book.start(Useful(0.0), 0)
    for second in range(1, 200):
        book.beat(float(second), second)
    book.end(200.0, 200, "clean")
    (life,) = read(tmp_path).lives
    assert [line["step"] for line in life.lines] == [0, 60, 120, 180, 200]


def test_lives_that_only_the_checkpoint_knows_are_carried_over(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "moved", History(3, 5000.0))
    assert book.history == History(3, 5000.0)
    (tmp_path / "moved").mkdir()
    book.start(Useful(0.0), 7)
    assert book.known(60.0) == History(3, 5060.0)
    book.end(50.0, 9, "exception")
    assert read(tmp_path / "moved").history() == History(4, 5050.0)
    assert Ledger(tmp_path / "moved", History(3, 5000.0)).history == History(4, 5050.0)  # once


def test_without_a_folder_the_checkpoint_is_all_there_is() -> None:
    book = Ledger(None, History(2, 10.0))
    book.start(Useful(0.0), 0)
    book.commit(5.0, 1, 0.1, 0.2)
    assert book.known(6.0) == History(2, 16.0)
    book.end(7.0, 2, "clean")
    book.end(7.0, 2, "clean")


@pytest.mark.parametrize(
    "damage",
    [
        b'{"event":"beat","life":"x","secon',
        b"\x00\xff\xfe garbage \x80",
        b"[1, 2, 3]\nnull\n17\n" + b"[" * 100_000,
        b'{"event":"end","life":"x","how":7,"seconds":"many"}\n{"event":"past","failures":-3,"seconds":NaN}\n',
        b'{"event":"beat","life":"x","seconds":1e999,"step":null}\n{"life":{"a":1},"event":"start"}\n',
        b'{"event":"beat","life":"x","seconds":1' + b"0" * 400 + b',"step":1' + b"0" * 400 + b"}\n",
    ],
)
def test_torn_and_strange_lines_are_passed_over(tmp_path: Path, damage: bytes) -> None:
    live(tmp_path, "exception")
    with open(tmp_path / LEDGER, "ab") as stream:
        stream.write(damage)
    live(tmp_path, "clean")
    history = read(tmp_path).history()
    assert history.failures in (1, 2)  # the strange life x was not ended
    assert history.seconds == 200.0
    assert len([life for life in read(tmp_path).lives if life.seconds]) == 2


def test_unknown_keys_and_events_are_kept_when_it_is_put_in_order(tmp_path: Path, monkeypatch) -> None:
    for _ in range(3):
        live(tmp_path, None, commits=50, cluster="blue")
    with open(tmp_path / LEDGER, "a") as stream:
        stream.write('{"event":"moon","phase":3}\n')
    before = read(tmp_path)
    monkeypatch.setattr(ledger, "LARGEST", 1000)
    live(tmp_path, "clean")
    after = read(tmp_path)
    assert len(after.lives) == 4
    assert all(life.last("start").get("cluster") == "blue" for life in after.lives[:3])
    assert {"event": "moon", "phase": 3} in after.others
    assert after.history() == History(before.history().failures, before.history().seconds + 100.0)
    assert [life.stalled for life in after.lives[:3]] == [life.stalled for life in before.lives]
    assert (tmp_path / LEDGER).stat().st_size < 5000
    assert os.listdir(tmp_path) == [LEDGER]


def test_size_is_bounded_and_the_counts_are_not_lost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ledger, "LARGEST", 4000)
    monkeypatch.setattr(ledger, "LIVES_KEPT", 5)
    for number in range(60):
        live(tmp_path, "exception" if number % 2 else "clean", commits=4)
    assert read(tmp_path).history() == History(30, 60 * 400.0)
    assert (tmp_path / LEDGER).stat().st_size < 10_000
    assert len(read(tmp_path).lives) < 15


def test_readers_see_whole_ledgers_while_it_is_written_and_put_in_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ledger, "LARGEST", 2000)
    live(tmp_path, "exception")
    done, seen = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            seen.append(read(tmp_path).history().seconds)

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(30):
        live(tmp_path, "exception", commits=3)
    done.set()
    reader.join()
    assert seen == sorted(seen)  # never less than before
    assert seen


def test_ledger_that_cannot_be_written_is_mentioned_and_given_up(tmp_path: Path, caplog) -> None:
    (tmp_path / LEDGER).mkdir()
    book = Ledger(tmp_path)
    book.start(Useful(0.0), 0)
    book.commit(100.0, 1, 0.1, 0.2)
    book.end(200.0, 2, "clean")
    assert caplog.text.count("failures are not written down") == 1
    assert Ledger(tmp_path / "not there").history == History()
    assert read(tmp_path / "not there") == Record()


def test_put_in_order_twice_is_as_put_in_order_once(tmp_path: Path) -> None:
    for number in range(5):
        live(tmp_path, [None, "clean"][number % 2], commits=5)
    once = ledger.in_order(read(tmp_path))
    assert ledger.in_order(understood(once)) == once
    assert all(json.loads(line) for line in once.splitlines())


def be_killed(folder: Path) -> None:
    book = Ledger(folder)
    book.start(Useful(0.0), 0)
    book.commit(100.0, 5, 0.1, 1.0)
    while not any(life.id == book.life and life.seconds == 100.0 for life in read(folder).lives):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def start_again(folder: Path) -> History:
    return Ledger(folder).history


def test_killed_life_counts_with_the_seconds_of_its_last_beat(tmp_path: Path) -> None:
    for _ in range(2):
        with start_forks(be_killed, tmp_path, world_size=1, timeout=60) as life_of_one:
            assert life_of_one.wait() == [-signal.SIGKILL], life_of_one.log(0)
    assert run_fork(start_again, tmp_path, timeout=60) == History(2, 200.0)
