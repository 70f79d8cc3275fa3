"""What cannot be seen without a CUDA device: one script, one device, under four minutes.

    python tests/gpu/check.py [--gib 8] [--json result.json]

Prints a line for each check and one JSON document, and ends with status 1 where a check failed:

- what is copied while training goes on is what is copied at once, to the bit, on one device and with ``FSDPStrategy``;
- a run that is resumed goes on with the very losses of one that was not interrupted;
- weights changed outside of a step are noticed;
- what a save keeps the training thread waiting, against copying the same bytes from the device to locked memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import EverySteps, Keep, ResilientCheckpoint, points
from lightning_resilience.manifest import Manifest
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.staging import Staging
from lightning_resilience.store import list_checkpoints, verify
from lightning_resilience.tiers import LocalTier

MOST_STALL = 0.1
"""Of copying the bytes from the device to locked memory: what an overlapped save may keep the training thread."""


class Model(L.LightningModule):
    """Layers with a batch norm and a follower, both changed in the forward."""

    def __init__(self, width: int = 512, depth: int = 4, clamps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.clamps = clamps
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.BatchNorm1d(width))
        self.register_buffer("seen", torch.zeros(width))
        self.losses: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.clamps:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.5, 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.add_(batch[0].mean(0).detach())
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.losses.append(loss.detach())  # type: ignore[arg-type]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-3)


class Settle(L.Callback):
    """Ends each save before the one after it."""

    def __init__(self, saver: ResilientCheckpoint) -> None:
        self.saver = saver

    def on_train_batch_end(self, *_: Any) -> None:
        if self.saver._session is not None:
            self.saver._session.engine.drain(60)


def data(width: int, steps: int = 12, batch: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(steps * batch, width, generator=generator)), batch_size=batch)


def fit(
    folder: Path,
    model: Model,
    *,
    strategy: Any = "auto",
    steps: int = 12,
    every: int = 3,
    resume: bool = False,
    width: int = 512,
    callbacks: tuple[L.Callback, ...] = (),
    **kwargs: Any,
) -> ResilientCheckpoint:
    L.seed_everything(0, verbose=False)
    kwargs = {"on_save_error": "raise", "keep": Keep(last=-1), **kwargs}
    saver = ResilientCheckpoint(folder, schedule=EverySteps(every), **kwargs)
    trainer = L.Trainer(
        accelerator="cuda", devices=1, strategy=strategy, max_epochs=1, max_steps=steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, Settle(saver), saver],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, data(width), ckpt_path="last" if resume else None)
    return saver


def committed(folder: Path) -> dict[str, Manifest]:
    found = list_checkpoints(LocalTier(folder)).committed
    for name, manifest in found.items():
        assert not verify(LocalTier(folder), name, manifest), f"{name} is damaged"
    return found


def content(path: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(lambda file: path / file, plain=True)
    tensors = {f"model.{name}": value for name, value in reader.read_full().items() if isinstance(value, Tensor)}
    for name, entry in reader.read_optimizer(0)["state"].items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in entry.items() if isinstance(value, Tensor)}
    return tensors


class Counted:
    """Counts the copies behind the training thread."""

    def __enter__(self) -> Counted:
        self.count, self._start = 0, Staging.start

        def start(staging: Staging) -> None:
            self.count += 1
            self._start(staging)

        Staging.start = start  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Staging.start = self._start  # type: ignore[method-assign]


def same_as_at_once(root: Path, strategy: Callable[[], Any], least: int = 3) -> dict[str, Any]:
    with Counted() as counted:
        fit(root / "behind", Model(), strategy=strategy())
    fit(root / "at-once", Model(), strategy=strategy(), overlap_staging=False)
    names = committed(root / "at-once")
    assert names.keys() == committed(root / "behind").keys(), "other checkpoints"
    assert counted.count >= least, "nothing was copied behind the training thread"
    for name in names:
        one, other = content(root / "at-once" / name), content(root / "behind" / name)
        assert one.keys() == other.keys(), "other tensors"
        wrong = [key for key in one if not torch.equal(one[key], other[key])]
        assert not wrong, f"{name}: {wrong[:3]} of {len(wrong)} differ"
    return {"checkpoints": len(names), "behind": counted.count}


def check_single(root: Path) -> dict[str, Any]:
    """One device: the same to the bit."""
    return same_as_at_once(root, lambda: "auto")


def check_fsdp(root: Path) -> dict[str, Any]:
    """``FSDPStrategy`` on one device: the same to the bit."""
    # Not sharded on one device, where its state dict may hold copies that look like anything else: copied at once.
    return same_as_at_once(root, lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}), least=0)


def check_resume(root: Path) -> dict[str, Any]:
    """A run that is resumed has the losses of one that was not interrupted."""
    whole, first, second = Model(), Model(), Model()
    fit(root / "whole", whole)
    fit(root / "parts", first, steps=6)
    fit(root / "parts", second, resume=True)
    one = [float(loss) for loss in whole.losses]
    other = [float(loss) for loss in (*first.losses, *second.losses)]
    assert len(other) == 12, f"{len(other)} steps"
    assert one == other, f"{sum(a != b for a, b in zip(one, other, strict=True))} losses differ"
    return {"steps": len(other)}


def check_clamp(root: Path) -> dict[str, Any]:
    """Weights changed outside of a step: that save is dropped, the next ones are right."""
    late = points.listen(lambda name: time.sleep(0.3) if name == "stage.piece" else None)
    with Counted() as counted:
        fit(root, Model(clamps=True), on_save_error="warn")
    late()
    steps = sorted(manifest.step for manifest in committed(root).values())
    assert counted.count == 1, f"{counted.count} copies behind the training thread"
    assert steps == [6, 9, 12], f"committed: {steps}"
    return {"committed": steps}


def check_stall(root: Path, gib: float) -> dict[str, Any]:
    """What saves keep the training thread waiting, against copying their bytes to locked memory."""
    width = 4096
    depth = max(int(gib * 2**30 / (12 * width * width)), 1)
    found: dict[str, Any] = {}
    for name, choice in (("behind", "auto"), ("at once", False)):
        stalls: list[float] = []
        steps: list[float] = []
        model = Model(width, depth)

        class Times(L.Callback):
            def __init__(self, into: list[float]) -> None:
                self.into = into
                self.began = 0.0

            def on_train_batch_start(self, *_: Any) -> None:
                torch.cuda.synchronize()
                now = time.perf_counter()
                if self.began:
                    self.into.append(now - self.began)
                self.began = now

        class Stalls(DummyLogger):
            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                if "resilience/stall_seconds" in metrics:
                    stalls.append(metrics["resilience/stall_seconds"])  # noqa: B023

        folder = root / name.replace(" ", "-")
        saver = ResilientCheckpoint(
            folder, schedule=EverySteps(3), keep=Keep(last=1), on_save_error="raise", overlap_staging=choice
        )
        trainer = L.Trainer(
            accelerator="cuda", devices=1, max_epochs=1, max_steps=12, logger=Stalls(), enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Times(steps), Settle(saver), saver], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, data(width, 24))
        size = next(iter(committed(folder).values())).size
        steady = stalls[1:-1]  # the first makes the slots, the last has no step after it
        found[name] = {
            "stalls": stalls,
            "median": statistics.median(steady),
            "bytes": size,
            "step": statistics.median(steps),
        }
        del model, trainer
    limit = copy_to_locked_memory(found["behind"]["bytes"])
    ratios = {name: entry["median"] / limit for name, entry in found.items()}
    assert ratios["behind"] <= MOST_STALL, f"stall is {ratios['behind']:.2f} of the copy"
    assert ratios["at once"] <= 1.3, f"at once it is {ratios['at once']:.2f} of the copy"
    return {"limit": limit, "ratios": ratios, **found}


def copy_to_locked_memory(size: int) -> float:
    """Seconds, the median of five."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="state whose stall is measured (default 8)")
    parser.add_argument("--json", type=Path, help="write the document to this file too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    checks: dict[str, Callable[[Path], dict[str, Any]]] = {
        "single": check_single,
        "resume": check_resume,
        "clamp": check_clamp,
        "stall": lambda root: check_stall(root, options.gib),
        "fsdp": check_fsdp,  # last: it leaves a process group
    }
    document: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "checks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, check in checks.items():
            begin = time.monotonic()
            try:
                result: dict[str, Any] = {"ok": True, **check(Path(folder) / name)}
            except BaseException as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            result["seconds"] = round(time.monotonic() - begin, 1)
            document["checks"][name] = result
            print(f"{name}: {'ok' if result['ok'] else result['error']} ({result['seconds']} s)", flush=True)
    text = json.dumps(document, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if all(result["ok"] for result in document["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
