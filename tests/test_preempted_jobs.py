"""Preemption by launchers and schedulers: several ranks, SLURM, torchrun, Lightning's own launcher, a time limit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from forks import run_fork, run_forks, start_forks
from lightning_resilience import Keep, points, preemption
from lightning_resilience.agreement import Agreement
from lightning_resilience.preemption import WALL_TIME, Preempted, Preemption
from lightning_resilience.ranks import Ranks
from probes import Witness, fit, whole_steps
from processes import TESTS, start_ranks
from support import TinyModel, data, make_trainer, strategy
from test_preemption import NEVER, TERM, USR1, Sent, Slow, Validated, commits, preempted

# -- ranks ------------------------------------------------------------------------------------------------------------


def preempted_together(root: Path, moment: str, ranks: Sequence[int], signals: Sequence[int], how: str) -> Any:
    sent = Sent(moment, step=0 if moment == "on_train_start" else 3, ranks=ranks, signals=signals)
    begin = time.monotonic()
    kwargs = {"val_check_interval": 4, "limit_val_batches": 2} if "validation" in moment else {}
    told = preempted(root, sent, ranks=2, how=how, model=Validated(), **kwargs)
    return told, time.monotonic() - begin


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("moment", "ranks", "signals", "how"),
    [
        ("on_after_backward", [0], [TERM], "ddp"),
        ("on_after_backward", [1], [TERM], "ddp"),
        ("on_before_optimizer_step", [0, 1], [TERM, TERM], "ddp"),
        ("on_validation_batch_start", [1], [TERM], "ddp"),
        ("on_train_start", [1], [USR1], "ddp"),
        ("on_after_backward", [1], [TERM], "fsdp"),
        ("on_after_backward", [1], [TERM], "fsdp2"),
    ],
)
def test_signal_on_any_rank_lets_all_save_the_same_step_and_stop(
    tmp_path: Path, moment: str, ranks: list[int], signals: list[int], how: str
) -> None:
    first, second = run_forks(preempted_together, tmp_path, moment, ranks, signals, how, world_size=2)
    (step, status), seconds = first
    assert second[0] == (step, status)
    assert status == 128 + signals[0]
    assert max(seconds, second[1]) < 20
    assert commits(tmp_path) == ([(step, preemption.name_of(signals[0]))] if step else [])
    assert (step > 0) == (moment != "on_train_start")


def preempted_by_different_signals(root: Path) -> tuple[int, int]:
    how = {"step": 3, "moment": "on_after_backward"}
    return preempted(root, Sent(ranks=[1, 2], signals=[TERM], **how), Sent(ranks=[3], signals=[USR1], **how), ranks=4)


@pytest.mark.ranks
def test_different_signals_on_different_ranks_of_four_are_one_stop(tmp_path: Path) -> None:
    told = run_forks(preempted_by_different_signals, tmp_path, world_size=4)
    step, status = told[0]
    assert told == [(step, status)] * 4
    assert commits(tmp_path) == [(step, preemption.name_of(status - 128))]


def ask_slowly(batches: int, signalled: int) -> list[int]:
    """Steps of a second, as far as the agreement can see: how many questions there were, and when it heard."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = Agreement(Ranks(rank, 2), seconds=0.01)
    heard = []
    for batch in range(batches):
        time.sleep(0.05)
        agreement.ask(None, TERM if rank == 1 and batch >= signalled else 0)
        heard += [batch] if agreement.signal else []
    agreement.close()
    dist.destroy_process_group()
    return heard


@pytest.mark.ranks
def test_ranks_with_long_steps_hear_of_a_signal_after_the_step_under_way(tmp_path: Path) -> None:
    assert run_forks(ask_slowly, 12, 8, world_size=2) == [[8, 9, 10, 11]] * 2


def upload_when_one_rank_is_told(root: Path) -> tuple[float, int]:
    """Training is over; rank 1 sends its files slowly, and is the only one to be signalled."""
    began: list[float] = []

    def strike(point: str) -> None:
        if point == "replicate.file" and not began:
            began.append(time.monotonic())
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), TERM)
            time.sleep(60)

    points.listen(strike)
    witness = Witness(root, NEVER, remote=(root / "cold").as_uri(), grace_seconds=2.0)
    with pytest.raises(Preempted) as stop:
        fit(root, witness, how="ddp", world_size=2, steps=3)
    return time.monotonic() - began[0], int(stop.value.code or 0)


@pytest.mark.ranks
def test_signal_on_one_rank_during_the_last_upload_ends_all_within_the_grace(tmp_path: Path) -> None:
    told = run_forks(upload_when_one_rank_is_told, tmp_path, world_size=2)
    assert [status for _, status in told] == [143, 143]
    assert max(seconds for seconds, _ in told) < 20
    assert whole_steps(tmp_path) == [3]


def test_signal_that_comes_while_a_rank_asks_whether_another_got_one_is_told_all_the_same() -> None:
    class TwoRanks:
        rank, world_size, session = 1, 2, "s"

        def board(self) -> Any:
            return self

        def has(self, key: str) -> bool:
            told._handle(TERM, None)
            return False

        def put_once(self, key: str, value: object) -> None:
            written.append(key)

    written: list[str] = []
    told = Preemption(TwoRanks())  # type: ignore[arg-type]
    told.grace = 2.0
    told.leave_by()
    told.leave_by()
    assert written == ["s/leaving"]


def two_folders(root: Path) -> tuple[list[str], list[str]]:
    others = Witness(root / "second", 5)
    preempted(root, Sent("on_after_backward", ranks=[1]), others, ranks=2, accumulate_grad_batches=3)
    first, second = (
        sorted(path.name for path in (folder / "run").glob("*.ckpt")) for folder in (root, root / "second")
    )
    return first, second


@pytest.mark.ranks
def test_two_callbacks_both_have_the_step_that_all_ranks_stopped_at(tmp_path: Path) -> None:
    (first, second), _ = run_forks(two_folders, tmp_path, world_size=2)
    assert first == second[-1:]
    assert len(first) == 1


def die_of_a_signal(root: Path, ranks: int) -> None:
    """As a script does: nobody catches anything."""
    sent = Sent("on_after_backward", ranks=[ranks - 1])
    how = "ddp" if ranks > 1 else "single"
    fit(root, sent, Slow(), Witness(root, NEVER, grace_seconds=10.0), how=how, world_size=ranks, steps=NEVER)
    (root / "went on").touch()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_status_of_the_process_says_that_the_run_is_not_finished(tmp_path: Path, ranks: int) -> None:
    with start_ranks(die_of_a_signal, tmp_path, ranks, world_size=ranks) as lives:
        assert lives.wait() == [143] * ranks, lives.log(0)
    assert [reason for _, reason in commits(tmp_path)] == ["SIGTERM"]
    assert not (tmp_path / "went on").exists()


def beside_a_process_that_lightning_started(root: Path) -> tuple[int, int]:
    return preempted(root, Sent("on_after_backward"), ranks=2, plugins=[LightningEnvironment()])


@pytest.mark.ranks
def test_process_that_lightning_watches_leaves_the_status_to_the_one_that_started_it(tmp_path: Path) -> None:
    env = {"NODE_RANK": "0"}
    (step, status), other = run_forks(beside_a_process_that_lightning_started, tmp_path, world_size=2, env=env)
    assert (status, other) == (143, (step, 0))  # it would kill that one, in the middle of its last work


# -- any time ---------------------------------------------------------------------------------------------------------

GRACE = 10.0


class Noting(L.Callback):
    """Writes down which steps this life has made, with their losses."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.number = number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.root / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        told = {"step": trainer.global_step, "losses": pl_module.history}
        (self.root / f"life-{self.number}-{trainer.global_rank}").write_text(json.dumps(told))


def one_of_many_lives(root: Path, number: int) -> None:
    witness = Witness(root, 7, keep=Keep(last=2), grace_seconds=GRACE)
    fit(root, Noting(root, number), Slow(), witness, how="ddp", world_size=2, steps=NEVER, resume="last")


def left_alone(root: Path, steps: int) -> list[tuple[int, float]]:
    model = TinyModel()
    fit(root, Witness(root, NEVER), model=model, how="ddp", world_size=2, steps=steps)
    return model.history


@pytest.mark.ranks
@pytest.mark.parametrize("lives", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_run_preempted_again_and_again_at_random_is_the_same_run(tmp_path: Path, lives: int) -> None:
    chance = random.Random(lives)
    stopped_at = 0
    losses: list[list[list[Any]]] = [[], []]
    for number in range(lives):
        for rank in (0, 1):
            (tmp_path / f"pid-{rank}").unlink(missing_ok=True)
        with start_forks(one_of_many_lives, tmp_path, number, world_size=2) as life:
            while not all(text_of(tmp_path / f"pid-{rank}") for rank in (0, 1)):
                assert None in [process.poll() for process in life.processes], life.log(0)
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.4))
            life.processes[chance.randrange(2)].send_signal(TERM)
            began = time.monotonic()
            assert life.wait() == [143, 143], life.log(0) + life.log(1)
            assert time.monotonic() - began < GRACE
        told = [json.loads((tmp_path / f"life-{number}-{rank}").read_text()) for rank in (0, 1)]
        step = told[0]["step"]
        assert told[1]["step"] == step
        new = [(at, reason) for at, reason in commits(tmp_path) if at > stopped_at and "SIGTERM" in reason]
        assert [at for at, _ in new] == ([step] if step > stopped_at else [])
        for rank in (0, 1):
            losses[rank] += told[rank]["losses"]
        stopped_at = step
    assert stopped_at > lives
    whole = run_forks(left_alone, tmp_path / "whole", stopped_at, world_size=2, timeout=300)
    assert [[tuple(one) for one in of_rank] for of_rank in losses] == whole


# -- SLURM ------------------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def scontrol(root: Path, exit_status: int = 0) -> str:
    """A PATH on which ``scontrol`` writes down what it is asked for, and what was committed then."""
    (root / "bin").mkdir()
    script = f'#!/bin/sh\necho "$@" $(ls {root}/run) >> {root}/asked\necho Invalid job >&2\nexit {exit_status}\n'
    (root / "bin" / "scontrol").write_text(script)
    (root / "bin" / "scontrol").chmod(0o755)
    return f"{root / 'bin'}:{os.environ['PATH']}"


def in_a_job(root: Path, signum: int, auto_requeue: bool = True, requeue_signal: int | None = None) -> tuple[int, int]:
    plugin = SLURMEnvironment(auto_requeue, requeue_signal and signal.Signals(requeue_signal))
    sent = Sent("on_after_backward", signals=[signum, signum])
    return preempted(root, sent, plugins=[plugin])


ARRAY = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("args", "env", "asked"),
    [
        ((USR1,), {}, "requeue 4711"),
        ((USR1,), ARRAY, "requeue 4700_3"),
        ((TERM,), {}, None),
        ((USR1, False), {}, None),
        ((int(signal.SIGUSR2), True, int(signal.SIGUSR2)), {}, "requeue 4711"),
    ],
)
def test_slurm_job_is_requeued_once_after_the_commit_and_only_at_its_signal(
    tmp_path: Path, args: tuple[Any, ...], env: dict[str, str], asked: str | None
) -> None:
    env = {**SLURM, **env, "PATH": scontrol(tmp_path)}
    assert run_fork(in_a_job, tmp_path, *args, env=env) == (4, 128 + args[0])
    assert [step for step, _ in commits(tmp_path)] == [4]
    there = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else None
    assert there == (f"{asked} epoch=0-step=4.ckpt\n" if asked else None)
    assert not list(tmp_path.glob("hpc_ckpt*"))


def goes_on_beside_an_hpc_checkpoint(root: Path) -> tuple[Any, int | None]:
    trainer = make_trainer(root, max_steps=2)
    trainer.fit(TinyModel(), data())
    trainer.save_checkpoint(root / "hpc_ckpt_1.ckpt")
    told = in_a_job(root, USR1)
    witness = Witness(root, NEVER)
    fit(root, witness, plugins=[SLURMEnvironment()], steps=6, resume="last")
    return told, witness.began


def test_requeue_that_fails_is_told_and_the_run_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    env = {**SLURM, "PATH": scontrol(tmp_path, exit_status=1)}
    told, began = run_fork(goes_on_beside_an_hpc_checkpoint, tmp_path, env=env)
    assert (told, began) == ((4, 138), 4)


def job_whose_time_ends(root: Path, ranks: int) -> tuple[int, int, bool]:
    """Step and status that it has stopped with, and whether that was in time, and not at once."""
    preemption.WALL_TIME_MARGIN, preemption.WALL_TIME_SHARE = 2.0, 0.5
    ends = time.time() + 8
    os.environ["SLURM_JOB_END_TIME"] = str(ends)
    return *preempted(root, ranks=ranks), 0 < ends - time.time() < 6


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_job_saves_and_stops_before_its_wall_time_ends(tmp_path: Path, ranks: int) -> None:
    told = run_forks(job_whose_time_ends, tmp_path, ranks, world_size=ranks, env={"SLURM_JOB_ID": "1"})
    step = told[0][0]
    assert told == [(step, 124, True)] * ranks
    assert commits(tmp_path) == [(step, "wall time ends")]


def test_margin_before_the_wall_time_ends_grows_with_what_a_save_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    told = Preemption(Ranks())
    assert told.wanted() == 0
    told.ends_at(now + 10_000)
    for left, save_seconds, wanted in [(100, 1, 0), (100, 30, WALL_TIME), (29, 0, WALL_TIME), (2001, 3600, 0)]:
        now = 11_000.0 - left
        assert told.wanted(save_seconds) == wanted, (left, save_seconds)
    now = 11_000.0 - 1999
    assert told.wanted(3600) == WALL_TIME


def test_wall_time_of_a_job_with_auto_requeue_requeues_it_and_one_that_is_over_is_another_jobs() -> None:
    told = Preemption(Ranks())
    told.ends_at(time.time() - 60)
    assert told.wanted() == 0
    told.agree(WALL_TIME)
    assert not told.wants_requeue
    told.requeue_signal = USR1
    assert told.wants_requeue


@pytest.mark.parametrize("came", [(TERM, USR1), (USR1, TERM), (USR1,)])
@pytest.mark.parametrize("elsewhere", [0, TERM])
def test_signal_that_requeues_counts_whatever_comes_beside_it(came: tuple[int, ...], elsewhere: int) -> None:
    told = Preemption(Ranks())
    told.requeue_signal = USR1
    for signum in came:
        told._handle(signum, None)
    told.agree(max(told.wanted(), elsewhere))
    assert told.agreed == USR1
    assert told.wants_requeue


def run_out_of_time(root: Path) -> tuple[int, bool]:
    trainer = fit(root, Slow(), Witness(root, NEVER), steps=NEVER, max_time={"seconds": 1})
    stopped_at = trainer.global_step
    trainer = fit(root, Witness(root, NEVER), steps=stopped_at + 5, resume="last")
    return stopped_at, trainer.global_step == stopped_at + 5


def test_run_that_ends_by_max_time_has_its_last_step_and_goes_on(tmp_path: Path) -> None:
    stopped_at, goes_on = run_fork(run_out_of_time, tmp_path)
    assert goes_on
    assert whole_steps(tmp_path) == [stopped_at, stopped_at + 5]


# -- launchers --------------------------------------------------------------------------------------------------------


class Tells(L.Callback):
    """Writes down that this rank trains, and how it ended."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 5 == 3:
            (self.root / f"trains-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        with open(self.root / f"ended-{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} {getattr(exception, 'code', repr(exception))}\n")


def script(root: Path, by: str, steps: int) -> None:
    """What the launched script runs."""
    how = strategy("ddp") if by == "torchrun" else "ddp"
    witness = Witness(root, NEVER, grace_seconds=20.0)
    fit(root, Slow(), Tells(root), witness, strategy=how, world_size=2, steps=steps, resume="last")


def launch(root: Path, *command: str, by: str, steps: int = NEVER) -> subprocess.Popen[bytes]:
    """Start ``command`` with a script that trains on two ranks."""
    main = root / "main.py"
    main.write_text(
        f"import pathlib, test_preempted_jobs as jobs\njobs.script(pathlib.Path({str(root)!r}), {by!r}, {steps})"
    )
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(root / "log", "ab") as log:
        return subprocess.Popen([*command, str(main)], env=env, stdout=log, stderr=log, cwd=root)


def wait_until_both_train(root: Path, process: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of the ranks."""
    ends = time.monotonic() + 60
    files = [root / f"trains-{rank}" for rank in (0, 1)]
    while not all(text_of(file) for file in files):
        assert process.poll() is None, (root / "log").read_text()
        assert time.monotonic() < ends
        time.sleep(0.02)
    return [int(text_of(file)) for file in files]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def endings(root: Path) -> list[list[list[int]]]:
    """For each rank, the step and status of each life."""
    lines = [(root / f"ended-{rank}").read_text().splitlines() for rank in (0, 1)]
    return [[[int(part) for part in line.split()] for line in of_rank] for of_rank in lines]


def leave_none_behind(root: Path, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for rank in (0, 1):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(text_of(root / f"trains-{rank}")), signal.SIGKILL)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.ranks
def test_torchrun_that_is_told_to_end_leaves_the_last_step_committed(tmp_path: Path) -> None:
    agent = launch(tmp_path, sys.executable, *TORCHRUN, by="torchrun")
    try:
        wait_until_both_train(tmp_path, agent)
        began = time.monotonic()
        agent.send_signal(TERM)
        assert agent.wait(40) != 0
        assert time.monotonic() - began < 25, (tmp_path / "log").read_text()
    finally:
        leave_none_behind(tmp_path, agent)
    (first,), (second,) = endings(tmp_path)
    assert first == second == [first[0], 143]
    assert commits(tmp_path) == [(first[0], "SIGTERM")]


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_a_preempted_rank_again_and_the_run_goes_on(tmp_path: Path) -> None:
    agent = launch(tmp_path, sys.executable, *TORCHRUN, "--max-restarts=1", by="torchrun", steps=500)
    try:
        os.kill(wait_until_both_train(tmp_path, agent)[1], TERM)
        assert agent.wait(90) == 0, (tmp_path / "log").read_text()
    finally:
        leave_none_behind(tmp_path, agent)
    (first,), (second,) = endings(tmp_path)
    assert first == second == [first[0], 143]
    assert [step for step, _ in commits(tmp_path)] == [first[0], 500]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_script_that_lightning_launches_itself_ends_with_the_status_too(tmp_path: Path, victim: int) -> None:
    main = launch(tmp_path, sys.executable, by="lightning")
    try:
        os.kill(wait_until_both_train(tmp_path, main)[victim], TERM)
        assert main.wait(40) == 143, (tmp_path / "log").read_text()
    finally:
        leave_none_behind(tmp_path, main)
    (first,), (second,) = endings(tmp_path)
    assert first[0] == second[0]
    assert (first[1], second[1]) == (143, 0)
    assert commits(tmp_path) == [(first[0], "SIGTERM")]
