"""Whole runs against a real S3 server that fails in every way: what was reported there is there, and stays."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from forks import run_fork, run_forks, start_forks
from lightning_resilience import EverySteps, Keep, ResilientCheckpoint, TierDenied, store
from lightning_resilience.manifest import Manifest
from lightning_resilience.remote import RemoteTier
from lightning_resilience.replication import Replicated
from s3_fault_proxy import Rule
from s3_fixtures import Bucket, Faults
from s3_server import S3Server
from support import TinyModel, data, make_trainer, settle, strategy


def fresh(url: str, options: dict[str, Any]) -> dict[str, Manifest]:
    """What a machine that knows nothing finds, each checked byte by byte."""
    tier = RemoteTier(url, options)
    found = store.list_checkpoints(tier).committed
    for name, manifest in found.items():
        assert store.verify(tier, name, manifest) == [], name
    return found


class Reporting(ResilientCheckpoint):
    """Writes down, durably, what it was told is in the cold tier."""

    journal: Path

    def on_checkpoint_replicated(self, trainer: Any, pl_module: Any, checkpoint: Replicated) -> None:
        if trainer.is_global_zero:
            with open(self.journal, "a") as journal:
                journal.write(f"{checkpoint.manifest.sequence}\n")
                journal.flush()
                os.fsync(journal.fileno())


class Slowly(L.Callback):
    """Gives a run time to be killed in."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.02)


def train(root: Path, url: str, options: dict[str, Any], steps: int, ranks: int = 1) -> int:
    """One life; the step that it began at."""
    model = TinyModel()
    callback = Reporting(
        root / "hot",
        schedule=EverySteps(1),
        keep=Keep(last=2),
        remote=url,
        storage_options=options,
        remote_keep=Keep(last=2),
        save_timeout=60,
    )
    callback.journal = root / "journal"
    settings: dict[str, Any] = {"strategy": strategy("ddp" if ranks > 1 else "single", ranks), "devices": ranks}
    trainer = make_trainer(root, settle(), Slowly(), callback, max_steps=steps, max_epochs=-1, **settings)
    trainer.fit(model, data(64), ckpt_path="last")
    return model.history[0][0] if model.history else steps


def test_machine_is_lost_and_the_run_goes_on_from_the_bucket(tmp_path: Path, bucket: Bucket) -> None:
    run_fork(train, tmp_path, bucket.url, bucket.storage_options, 6)
    shutil.rmtree(tmp_path / "hot")
    assert run_fork(train, tmp_path, bucket.url, bucket.storage_options, 9) == 6
    assert sorted(manifest.step for manifest in fresh(bucket.url, bucket.storage_options).values())[-2:] == [8, 9]
    assert bucket.uploads() == []


@pytest.mark.ranks
def test_two_ranks_share_the_way_there_and_back(tmp_path: Path, bucket: Bucket, faults: Faults) -> None:
    run_forks(train, tmp_path, bucket.url, faults.storage_options, 4, 2)
    size = sum(manifest.size for manifest in fresh(bucket.url, bucket.storage_options).values()) // 2
    shutil.rmtree(tmp_path / "hot")
    faults.requests.clear()
    assert run_forks(train, tmp_path, bucket.url, faults.storage_options, 6, 2) == [4, 4]
    fetched = [
        target for method, target in faults.requests if method == "GET" and "__" in target and "step%3D4" in target
    ]
    assert size > 0
    assert len(fetched) == len({*fetched})  # no file is fetched by both


RULES = {
    "slow down": [Rule("status", probability=0.3)],
    "resets": [
        Rule("reset_before", probability=0.1),
        Rule("reset_request", probability=0.1, after_bytes=5000, method="PUT"),
    ],
    "lost answers": [Rule("ack_lost", probability=0.3, method="PUT")],
    "cut answers": [Rule("truncate_response", probability=0.2, after_bytes=3000, method="GET")],
    "flipped bits": [Rule("corrupt", times=1, after_bytes=4000, method="GET", path=r"distcp")],
}


EVERY_DAY = ("slow down", "flipped bits")


@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in RULES]
)
def test_run_through_a_bad_network_ends_with_everything_there(
    tmp_path: Path, bucket: Bucket, faults: Faults, name: str
) -> None:
    for rule in RULES[name]:
        faults.add(rule)
    run_fork(train, tmp_path, bucket.url, faults.storage_options, 6)
    shutil.rmtree(tmp_path / "hot")
    began = run_fork(train, tmp_path, bucket.url, faults.storage_options, 8)
    faults.clear()
    assert name not in EVERY_DAY or all(rule.hits for rule in RULES[name])
    found = fresh(bucket.url, bucket.storage_options)
    assert max(manifest.step for manifest in found.values()) == 8
    assert began in (5, 6)  # a bit may flip each time that one is read
    assert bucket.uploads() == []


def test_rule_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="slowdown"):
        Rule("slowdown")  # type: ignore[arg-type]


def test_wrong_bucket_stops_the_run_at_setup(tmp_path: Path, bucket: Bucket) -> None:
    callback = ResilientCheckpoint(
        tmp_path / "hot", remote="s3://no-such-bucket-here/run", storage_options=bucket.storage_options
    )
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(TierDenied, match="no-such-bucket-here") as caught:
        trainer.fit(TinyModel(), data())
    assert bucket.storage_options["secret"] not in str(caught.value)
    assert trainer.global_step == 0


@pytest.mark.parametrize("lives", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_whatever_is_killed_what_was_reported_is_there_and_last_never_goes_back(
    tmp_path: Path, bucket: Bucket, s3_server: S3Server, lives: int
) -> None:
    chance = random.Random(lives)
    newest, steps = 0, 0
    for life in range(lives):
        steps += 8
        what = chance.choice(["process", "server", "both"])
        with start_forks(train, tmp_path, bucket.url, bucket.storage_options, steps, world_size=1) as running:
            killer = threading.Timer(chance.uniform(0.3, 1.5), _kill, [what, running, s3_server, chance.uniform(0, 1)])
            killer.start()
            status = running.wait()
            killer.join()
        assert status in ([0], [-9]), running.log(0)[-2000:]
        journal = tmp_path / "journal"
        reported = [int(line) for line in journal.read_text().split()] if journal.exists() else []
        if life % 3 == 2:
            shutil.rmtree(tmp_path / "hot", ignore_errors=True)
        found = fresh(bucket.url, bucket.storage_options)
        sequences = [manifest.sequence for manifest in found.values()]
        assert max(sequences, default=0) >= max([newest, *reported])
        newest = max(sequences, default=0)
    run_fork(train, tmp_path, bucket.url, bucket.storage_options, steps + 2)  # left alone, it gets there
    assert max(manifest.step for manifest in fresh(bucket.url, bucket.storage_options).values()) == steps + 2


def _kill(what: str, running: Any, server: S3Server, pause: float) -> None:
    if what in ("server", "both"):
        server.kill()
        time.sleep(pause)
    if what in ("process", "both"):
        running.kill()
    if what in ("server", "both"):
        server.start()
