"""Ranks as in ``processes``, for tests that need many short lives: forked from a server that has imported everything.

A forked process is as real as a launched one, and dies as well, but is there in a tenth of a second instead of four.
What it is not good for is the end of a Python process: it leaves without the interpreter's shutdown.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from processes import TESTS, Ranks, _main, free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lightning.pytorch", "torch.distributed.checkpoint", "lightning_resilience.callback"])


NOBODY_KNOWS = 255


class _Process:
    """A forked process behind the part of ``subprocess.Popen`` that ``Ranks`` uses."""

    def __init__(self, *args: Any) -> None:
        self._process = _context.Process(target=_live, args=args)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of ``subprocess``.  A fork that is killed before its server can tell how it ended has 255."""
        status = self._process.exitcode
        return -signal.SIGKILL if status == NOBODY_KNOWS else status

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.returncode
        if status is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.pid is not None and self._process.exitcode is None:
            os.kill(self.pid, sig)


class Forks(Ranks):
    """N forked processes that run ``function(*args)``; otherwise like ``Ranks``."""

    def _start(self, rank: int, world_size: int, env: dict[str, str]) -> Any:
        if rank == 0:
            self._port = free_port()
        return _Process(str(self.folder), rank, world_size, self._port, self.timeout, env)


def _live(folder: str, rank: int, world_size: int, port: int, timeout: float, env: dict[str, str]) -> None:
    """What a forked process does: look like a launched one, and call the function."""
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    os.environ.update(env)
    if world_size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        where = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        os.environ.update({name: str(value) for name, value in {**ranks, **where}.items()})
    import torch

    torch.set_num_threads(1)
    _main([folder, str(rank), str(timeout)])


def start_forks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Forks:
    """Start processes and return at once."""
    return Forks(function, *args, **kwargs)


def run_forks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks and return what each returned."""
    with Forks(function, *args, **kwargs) as ranks:
        return ranks.results()


def run_fork(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args)`` in one process."""
    return run_forks(function, *args, world_size=1, **kwargs)[0]
