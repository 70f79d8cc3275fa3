"""Folders that end with their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lightning_resilience import scratch
from lightning_resilience.scratch import Scratch

LIVE = """
import sys
from pathlib import Path
from lightning_resilience.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]), sys.argv[2])
(scratch.path / "file").write_text("bytes")
print("ready", flush=True)
sys.stdin.read()
"""


FORKS = """
import os, time
from pathlib import Path
from lightning_resilience.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]), sys.argv[2])
child = os.fork()
if not child:
    scratch.close()  # it is not its own
    print("child", os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def start(root: Path, token: str) -> subprocess.Popen[str]:
    """Another process with a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(root), token], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    dead, living = start(tmp_path, "dead"), start(tmp_path, "living")
    kill(dead)
    mine = Scratch(tmp_path, "mine")
    other = tmp_path / "somebody-else"
    other.mkdir()
    scratch.sweep(tmp_path)
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {"living", "mine", "else"}
    kill(living)
    mine.close()
    scratch.sweep(tmp_path)
    assert [*tmp_path.iterdir()] == [other]


def test_a_forked_process_that_outlives_the_killed_one_keeps_nothing_of_it(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys{FORKS}", str(tmp_path), "mine"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline().split()[1])
    try:
        scratch.sweep(tmp_path)
        assert len([*tmp_path.iterdir()]) == 1  # the parent lives
        parent.kill()
        parent.wait()
        scratch.sweep(tmp_path)
        assert [*tmp_path.iterdir()] == []
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_what_somebody_reads_of_a_dead_process_stays_meanwhile_and_that_of_a_living_one_is_not_read(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, "one")
    (folder,) = tmp_path.iterdir()
    assert scratch.hold_dead(folder) == []
    kill(process)
    held = scratch.hold_dead(folder)
    held += scratch.hold_dead(folder)  # by another one too
    assert len(held) == 2
    scratch.sweep(tmp_path)
    assert (folder / "file").read_text() == "bytes"
    for fd in held:
        os.close(fd)
    scratch.sweep(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_folder_that_others_may_use_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    process = start(tmp_path, "one")
    kill(process)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    scratch.sweep(tmp_path)
    assert folder.exists()
    folder.chmod(0o700)
    real = folder.rename(tmp_path / "real")
    folder.symlink_to(real)
    scratch.sweep(tmp_path)
    assert (real / "file").exists()


def test_folder_that_processes_share_stays_until_the_last_is_gone(tmp_path: Path) -> None:
    first, second = start(tmp_path, "shared"), start(tmp_path, "shared")
    kill(first)
    scratch.sweep(tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    kill(second)
    scratch.sweep(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_emptied_folder_is_still_ours(tmp_path: Path) -> None:
    mine = Scratch(tmp_path, "mine")
    assert mine.path.stat().st_mode & 0o777 == 0o700
    (mine.path / "a.ckpt").mkdir()
    (mine.path / "a.ckpt" / "file").write_text("bytes")
    mine.empty()
    assert not (mine.path / "a.ckpt").exists()
    scratch.sweep(tmp_path)
    assert mine.path.is_dir()
    mine.close()
    assert [*tmp_path.iterdir()] == []
