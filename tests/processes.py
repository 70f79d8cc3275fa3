"""Start ranks as real processes that talk over gloo, and get their results or the first one's traceback.

``run_ranks(function, …)`` calls a function of a test module in N fresh processes, each with the environment that
torchrun gives. ``start_ranks`` does not wait, for tests that kill.  Every process dumps its stacks and exits when its
time is up, so a hang is loud, and whatever is still running at the end is killed by its id.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


class Ranks:
    """N processes that run ``function(*args)``; a context manager that leaves none behind."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 90,
        env: dict[str, str] | None = None,
    ) -> None:
        self.timeout = timeout
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self.folder / "call").write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        self.began = time.monotonic()
        self.processes = [self._start(rank, world_size, env or {}) for rank in range(world_size)]

    def _start(self, rank: int, world_size: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        if rank == 0:
            self._port = free_port()
        distributed = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RUN_ID": "test",
        }
        paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        if world_size > 1:
            settings |= {name: str(value) for name, value in distributed.items()}
        with open(self.folder / f"log-{rank}", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "processes", str(self.folder), str(rank), str(self.timeout)],
                env={**os.environ, **settings, **env},
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def log(self, rank: int) -> str:
        """What a rank printed so far."""
        return (self.folder / f"log-{rank}").read_text(errors="replace")

    def wait(self) -> list[int]:
        """Exit status of each rank, once all have ended; those that outlive the time are killed."""
        for process in self.processes:
            left = self.timeout + 10 - (time.monotonic() - self.began)
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(left, 0.1))
        self.kill()
        return [process.returncode for process in self.processes]

    def results(self) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            RankFailed: a rank did not return; the one that failed first is shown.
        """
        statuses = self.wait()
        failed = [rank for rank, status in enumerate(statuses) if status != 0]
        if failed:
            raised = [rank for rank in failed if (self.folder / f"error-{rank}").exists()]
            first = min(raised, key=lambda rank: os.path.getmtime(self.folder / f"error-{rank}"), default=failed[0])
            raise RankFailed(f"rank {first} failed, statuses {statuses}:\n{self.log(first)[-6000:]}")
        return [pickle.loads((self.folder / f"result-{rank}").read_bytes()) for rank in range(len(statuses))]

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Send a signal to every rank that lives."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(sig)
        if sig == signal.SIGKILL:
            for process in self.processes:
                process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_ranks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Ranks:
    """Start processes and return at once."""
    return Ranks(function, *args, **kwargs)


def run_ranks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks and return what each returned."""
    with Ranks(function, *args, **kwargs) as ranks:
        return ranks.results()


def run_alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args)`` in one fresh process."""
    return run_ranks(function, *args, world_size=1, **kwargs)[0]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(arguments: Sequence[str]) -> None:
    folder, rank, timeout = Path(arguments[0]), arguments[1], float(arguments[2])
    faulthandler.dump_traceback_later(timeout, exit=True)
    module, name, args = pickle.loads((folder / "call").read_bytes())
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        result = function(*args)  # type: ignore[operator]
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main(sys.argv[1:])
