"""A signal to any rank, at any moment: all ranks commit the same step once, and end with "not finished"."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from forks import run_fork
from lightning_resilience import ResilientCheckpoint, SaveFailed, SetupError, points, store
from lightning_resilience.preemption import Preempted, Preemption, check_signals
from lightning_resilience.tiers import LocalTier
from probes import Witness, fit, slow, whole_steps
from support import TinyModel, committed, data, make_trainer

NEVER = 10**6
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


def kill_self(signum: int = TERM) -> None:
    os.kill(os.getpid(), signum)


class Sent(L.Callback):
    """Sends this process signals in a hook: ``moment`` is the hook's name, ``step`` the global step it is at."""

    def __init__(
        self, moment: str, step: int = 3, signals: Sequence[int] = (TERM,), ranks: Sequence[int] = (0,)
    ) -> None:
        self.moment = moment
        self.step = step
        self.left = list(signals) if int(os.environ.get("RANK", "0")) in ranks else []
        self.at = 0.0
        setattr(self, moment, self._send)

    def _send(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and not (trainer.sanity_checking and self.moment == "on_validation_start"):
            while self.left:
                self.at = time.monotonic()
                kill_self(self.left.pop(0))


class Slow(L.Callback):
    """Steps of 10 ms, so that there is time for an answer."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.01)


def commits(root: Path) -> list[tuple[int, str]]:
    """Step and reason of each checkpoint, oldest first; all are whole."""
    steps = whole_steps(root)
    manifests = store.list_checkpoints(LocalTier(root / "run")).committed.values()
    found = sorted((manifest.step, manifest.reason) for manifest in manifests)
    assert [step for step, _ in found] == steps
    return found


def preempted(root: Path, *callbacks: L.Callback, ranks: int = 1, steps: int = NEVER, **kwargs: Any) -> tuple[int, int]:
    """Train until a signal ends it; the step and the exit status."""
    how = kwargs.pop("how", "ddp" if ranks > 1 else "single")
    witness = kwargs.pop("checkpoint", None) or Witness(root, kwargs.pop("every", NEVER))
    Preemption.period = 0.2  # type: ignore[assignment,misc]  # of this process, which is a fork: to have answers sooner
    before = [signal.getsignal(one) for one in (TERM, USR1)]
    with pytest.raises(Preempted) as stop:
        fit(root, *callbacks, Slow(), witness, how=how, world_size=ranks, steps=steps, **kwargs)
    assert [signal.getsignal(one) for one in (TERM, USR1)] == before
    return stop.value.step, stop.value.code  # type: ignore[return-value]


# -- one process ------------------------------------------------------------------------------------------------------


def test_signal_in_a_step_saves_that_step_and_stops_with_the_signals_status(tmp_path: Path) -> None:
    assert run_fork(preempted, tmp_path, Sent("on_after_backward")) == (4, 143)
    assert commits(tmp_path) == [(4, "SIGTERM")]


def resumed(root: Path, steps: int, ranks: int = 1, **kwargs: Any) -> tuple[int | None, list[tuple[int, float]], float]:
    """Train from "last" to ``steps``: where it began, the losses, and a sum over all weights."""
    witness = Witness(root, NEVER)
    model = kwargs.pop("model", None) or TinyModel()
    how = "ddp" if ranks > 1 else "single"
    fit(root, witness, model=model, how=how, world_size=ranks, steps=steps, resume="last", **kwargs)
    return witness.began, model.history, sum(float(p.double().sum()) for p in model.parameters())


class Validated(TinyModel):
    """Brings its own validation data, and may send a signal from inside the optimizer, before a step is half done."""

    def __init__(self, strikes: bool = False) -> None:
        super().__init__()
        self.strikes = strikes

    def val_dataloader(self) -> Any:
        return data(16)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: kill_self() if self.strikes and self.global_step == 3 else None)
        return optimizer


MOMENTS: dict[str, Callable[[], list[L.Callback]]] = {
    "in a backward": lambda: [Sent("on_after_backward")],
    "in the optimizer": list,
    "before a step": lambda: [Sent("on_before_optimizer_step")],
    "after a batch": lambda: [Sent("on_train_batch_end")],
    "between epochs": lambda: [Sent("on_train_epoch_start", step=15)],
    "at the end of an epoch": lambda: [Sent("on_train_epoch_end")],
    "in a validation": lambda: [Sent("on_validation_batch_start")],
    "twice": lambda: [Sent("on_after_backward", signals=(TERM, TERM))],
    "after another one": lambda: [Sent("on_after_backward", signals=(USR1, TERM))],
    "while the writer waits": lambda: [Holding()],
    "from the writer": lambda: [Holding(strikes=True)],
}


class Holding(L.Callback):
    """Holds, in a step, a lock that the background writer needs, and is sent the signal there or by the writer."""

    def __init__(self, strikes: bool = False) -> None:
        self.strikes = strikes
        self.lock = threading.Lock()
        self.stop = points.listen(self._reached)

    def _reached(self, point: str) -> None:
        if point == "persist.mid-file":
            self.stop()
            with self.lock:
                if self.strikes:
                    kill_self()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            with self.lock:
                time.sleep(0.05)
                if not self.strikes:
                    kill_self()


def preempted_at_all_moments(root: Path) -> dict[str, tuple[int, int, list[tuple[int, str]], bool]]:
    """For each moment: step, status, what is committed, and whether what follows is as if nothing had happened."""
    validates = {"val_check_interval": 4, "limit_val_batches": 2}
    whole = resumed(root / "whole", 20, model=Validated(), **validates)
    told = {}
    for moment, callbacks in MOMENTS.items():
        folder = root / moment
        folder.mkdir()
        every = 3 if "writer" in moment else NEVER
        model = Validated(strikes="optimizer" in moment)
        step, status = preempted(folder, *callbacks(), every=every, model=model, **validates)
        kept = commits(folder)
        began, history, weights = resumed(folder, 20, model=Validated(), **validates)
        assert began == step
        told[moment] = (step, status, kept, history == whole[1][step:] and weights == whole[2])
    return told


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_fork(preempted_at_all_moments, tmp_path_factory.mktemp("moments"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_at_any_moment_saves_one_step_boundary_from_which_the_run_goes_on_exactly(
    moments: dict[str, Any], moment: str
) -> None:
    step, status, kept, is_same = moments[moment]
    assert status == (138 if "another" in moment else 143)
    assert [step for step, reason in kept if "SIG" in reason] == [step]
    assert kept[-1][0] == step
    assert len(kept) == (2 if "writer" in moment and step > 3 else 1)
    assert is_same


def before_there_is_anything_to_save(root: Path) -> tuple[Any, Any, list[int]]:
    fresh = preempted(root, Sent("on_sanity_check_start", step=0), model=Validated(), num_sanity_val_steps=2)
    resumed(root, 4)
    return fresh, preempted(root, Sent("on_train_start"), resume="last"), whole_steps(root)


def test_signal_before_the_first_step_stops_the_run_where_it_was(tmp_path: Path) -> None:
    assert run_fork(before_there_is_anything_to_save, tmp_path) == ((0, 143), (4, 143), [4])


def accumulate(root: Path) -> tuple[int, bool]:
    window = {"accumulate_grad_batches": 4}
    step, _ = preempted(root, Sent("on_after_backward", step=2), **window)
    whole = resumed(root / "whole", 10, **window)
    rest = resumed(root, 10, **window)
    return step, (rest[1], rest[2]) == (whole[1][4 * step :], whole[2])


def test_signal_inside_an_accumulation_window_saves_at_its_end(tmp_path: Path) -> None:
    assert run_fork(accumulate, tmp_path) == (3, True)
    assert (3, "SIGTERM") in commits(tmp_path)


def stop_in_spite_of(root: Path) -> tuple[tuple[int, int], int]:
    stopping = L.pytorch.callbacks.EarlyStopping("val_loss", patience=50)
    rest: dict[str, Any] = {"steps": 12, "resume": "last", "val_check_interval": 2}
    told = preempted(root, Sent("on_after_backward"), min_steps=30, min_epochs=3)
    assert told[0] == 4
    return told, fit(root, Witness(root, NEVER), stopping, model=Validated(), **rest).global_step


def test_a_minimum_of_steps_holds_no_preemption_up_and_the_stop_is_not_taken_for_the_end(tmp_path: Path) -> None:
    assert run_fork(stop_in_spite_of, tmp_path) == ((4, 143), 12)


class FailingStore(Witness):
    """Its disk is full."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        points.listen(self._fail)

    def _fail(self, point: str) -> None:
        if point == "persist.begin":
            raise OSError(28, "No space left on device")


def preempted_with_a_full_disk(root: Path) -> tuple[int, int]:
    with pytest.warns(UserWarning, match=r"step that training stops at is not saved.*No space left"):
        return preempted(root, Sent("on_after_backward"), checkpoint=FailingStore(root, NEVER))


def fail_for_good(root: Path) -> str:
    with pytest.raises(SaveFailed) as failed:
        fit(root, Sent("on_after_backward"), FailingStore(root, NEVER, on_save_error="raise"), steps=NEVER)
    return str(failed.value)


def test_a_full_disk_does_not_keep_a_run_from_stopping(tmp_path: Path) -> None:
    assert run_fork(preempted_with_a_full_disk, tmp_path) == (4, 143)
    assert "No space left" in run_fork(fail_for_good, tmp_path)
    assert whole_steps(tmp_path) == []


# -- handlers ---------------------------------------------------------------------------------------------------------


def with_handlers_of_the_users(root: Path) -> dict[str, Any]:
    heard: list[int] = []

    def note(signum: int, frame: Any) -> None:
        heard.append(signum)

    def leave(signum: int, frame: Any) -> None:
        sys.exit(7)

    told: dict[str, Any] = {}
    signal.signal(TERM, note)
    told["chained"] = preempted(root, Sent("on_after_backward"))
    told["heard"] = list(heard)
    signal.signal(TERM, leave)
    with pytest.raises(Preempted) as stop:
        fit(root, Sent("on_after_backward", step=6), Witness(root, NEVER), steps=NEVER, resume="last")
    told["exits"] = (stop.value.step, repr(stop.value.__cause__))
    told["left in place"] = signal.getsignal(TERM) is leave
    signal.signal(TERM, signal.SIG_IGN)
    with pytest.raises(ZeroDivisionError):
        fit(root, Raises(), Witness(root, NEVER), steps=NEVER, resume="last")
    told["after an exception"] = signal.getsignal(TERM)
    fit(root, Witness(root, NEVER), steps=9, resume="last")
    told["after the end"] = signal.getsignal(TERM)
    return told


class Raises(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


def test_handlers_of_the_user_are_called_and_put_back_however_training_ends(tmp_path: Path) -> None:
    told = run_fork(with_handlers_of_the_users, tmp_path)
    assert told == {
        "chained": (4, 143),
        "heard": [TERM],
        "exits": (7, "SystemExit(7)"),
        "left in place": True,
        "after an exception": signal.SIG_IGN,
        "after the end": signal.SIG_IGN,
    }


def interrupt(root: Path) -> tuple[list[tuple[int, int]], bool]:
    asked = [Witness(root, NEVER, signals=names) for names in (("SIGINT",), (signal.SIGUSR2, "USR1"))]
    sent = [Sent("on_after_backward", signals=[int(one)]) for one in (signal.SIGINT, signal.SIGUSR2)]
    told = [preempted(root, one, checkpoint=checkpoint) for one, checkpoint in zip(sent, asked, strict=True)]
    with pytest.raises(SystemExit) as stop:
        fit(root, Sent("on_after_backward", signals=[int(signal.SIGINT)] * 2), asked[0], steps=NEVER)
    return told, isinstance(stop.value.__context__, KeyboardInterrupt)


def test_other_signals_are_handled_on_request_and_a_second_interrupt_is_one(tmp_path: Path) -> None:
    assert run_fork(interrupt, tmp_path) == ([(4, 130), (4, 128 + int(signal.SIGUSR2))], True)


class Forking(L.Callback):
    """Forks in a step, and sends signals to the children."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        for signum in (TERM, USR1):
            pid = os.fork()
            if not pid:
                kill_self(signum)
                os._exit(5)
            self.statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class StrikingWorkers(Dataset[Tensor]):
    """Every worker is sent what SLURM sends to all processes of a job."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> list[Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            kill_self(USR1)
        return [torch.full((8,), float(index)), torch.ones(1)]


def children(root: Path) -> tuple[list[int], int, int]:
    forking = Forking()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        fit(root, forking, Witness(root, NEVER), steps=4)
        trainer = make_trainer(root, Witness(root, NEVER), max_steps=8, max_epochs=-1)
        loader = DataLoader(StrikingWorkers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        trainer.fit(TinyModel(), loader, ckpt_path="last")
    with pytest.raises(Preempted) as stop:
        fit(root, Sent("on_after_backward"), Witness(root, NEVER), steps=NEVER, resume="last")
    return forking.statuses, trainer.global_step, stop.value.step


def test_forked_children_do_not_speak_for_the_run_and_workers_of_loaders_live_on(tmp_path: Path) -> None:
    assert run_fork(children, tmp_path) == ([-TERM, 5], 8, 9)


def in_a_thread(root: Path) -> list[int]:
    thread = threading.Thread(target=fit, args=(root, Witness(root, NEVER)), kwargs={"steps": 3})
    thread.start()
    thread.join()
    return whole_steps(root)


def test_fit_outside_of_the_main_thread_handles_no_signals_and_trains(tmp_path: Path) -> None:
    assert run_fork(in_a_thread, tmp_path) == [3]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"signals": "SIGTERM"}, "a list of signals"),
        ({"signals": ["SIGNONSENSE"]}, "'SIGNONSENSE' is not a signal"),
        ({"signals": [True]}, "True is not a signal"),
        ({"signals": [0]}, "0 is not a signal"),
        ({"signals": [9]}, "SIGKILL can be handled by no process"),
        ({"signals": ["SIGCHLD"]}, "SIGCHLD tells of a crash"),
        ({"grace_seconds": 0}, "grace_seconds=0"),
        ({"grace_seconds": "30"}, "grace_seconds='30'"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(SetupError, match=match):
        ResilientCheckpoint(**kwargs)


def test_signals_by_name_and_number_are_the_same() -> None:
    assert check_signals(["SIGTERM", "TERM", 15, signal.SIGTERM]) == (15,)
    assert ResilientCheckpoint(signals=[15]).signals == ("SIGTERM",)


# -- grace ------------------------------------------------------------------------------------------------------------


def preempted_with_a_slow_cold_tier(root: Path, grace: float) -> tuple[tuple[int, int], float, list[int]]:
    """What came of it, how long after the signal, and what the cold tier had then."""
    slow(60.0, "replicate.file")
    sent = Sent("on_after_backward")
    remote = (root / "cold").as_uri()
    checkpoint = Witness(root, NEVER, remote=remote, grace_seconds=grace)
    told = preempted(root, sent, checkpoint=checkpoint)
    return told, time.monotonic() - sent.at, [m.step for m in committed(root / "cold")]


def finish_the_copy(root: Path) -> list[int]:
    resumed_with = Witness(root, NEVER, remote=(root / "cold").as_uri())
    fit(root, resumed_with, steps=5, resume="last")
    return [m.step for m in committed(root / "cold")]


def test_the_cold_tier_gets_what_is_left_of_the_grace_and_the_next_start_does_the_rest(tmp_path: Path) -> None:
    told, seconds, cold = run_fork(preempted_with_a_slow_cold_tier, tmp_path, 5.0)
    assert told == (4, 143)
    assert seconds < 5.0
    assert whole_steps(tmp_path) == [4]
    assert cold == []
    assert run_fork(finish_the_copy, tmp_path) == [4, 5]


def preempted_with_a_slow_writer(root: Path) -> tuple[tuple[int, int], float]:
    slow(60.0)
    sent = Sent("on_after_backward")
    with pytest.warns(UserWarning, match="step that training stops at is not saved.*does not answer in time"):
        told = preempted(root, sent, checkpoint=Witness(root, NEVER, grace_seconds=1.0))
    return told, time.monotonic() - sent.at


def test_a_save_that_takes_longer_than_the_grace_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    told, seconds = run_fork(preempted_with_a_slow_writer, tmp_path)
    assert told == (4, 143)
    assert seconds < 20
    assert run_fork(resumed, tmp_path, 5)[0] == 0
    assert whole_steps(tmp_path) == [5]


def preempted_with_time(root: Path) -> list[int]:
    preempted(root, Sent("on_after_backward"), checkpoint=Witness(root, NEVER, remote=(root / "cold").as_uri()))
    return [m.step for m in committed(root / "cold")]


def test_with_time_the_cold_tier_has_the_last_step_too(tmp_path: Path) -> None:
    assert run_fork(preempted_with_time, tmp_path) == [4]


def signalled_while_uploading(root: Path) -> tuple[float, int, list[int]]:
    """Training is over, and its last step is on its way to a slow cold tier, when the signal comes."""
    began: list[float] = []

    def strike(point: str) -> None:
        if point == "replicate.file" and not began:
            began.append(time.monotonic())
            kill_self()
            time.sleep(60)

    points.listen(strike)
    witness = Witness(root, NEVER, remote=(root / "cold").as_uri(), grace_seconds=2.0)
    with pytest.raises(Preempted) as stop:
        fit(root, witness, steps=3)
    return time.monotonic() - began[0], stop.value.code, whole_steps(root)  # type: ignore[return-value]


def test_signal_during_the_last_upload_ends_the_run_within_the_grace(tmp_path: Path) -> None:
    seconds, status, steps = run_fork(signalled_while_uploading, tmp_path)
    assert seconds < 20
    assert (status, steps) == (143, [3])


def test_preempted_crosses_processes_whole() -> None:
    twin = pickle.loads(pickle.dumps(Preempted(TERM, 7)))
    assert (twin.signum, twin.step, twin.code, str(twin)) == (TERM, 7, 143, "preempted at step 7: SIGTERM")
