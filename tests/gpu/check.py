"""What cannot be seen without a CUDA device: one script, one device, under four minutes.

    python tests/gpu/check.py [--gib 8] [--only NAME …] [--json result.json]

Prints a line for each check and one JSON document, and ends with status 1 where a check failed:

- what is copied while training goes on is what is copied at once, to the bit: one device, ``FSDPStrategy``, FSDP2;
- a run that is resumed goes on with the very losses of one that was not interrupted, dropout and all: one device,
  ``FSDPStrategy``, FSDP2, and after SIGKILL from what is left in memory;
- weights changed outside of a step are noticed;
- what a save keeps the training thread waiting, against copying the same bytes from the device to locked memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import EverySteps, Keep, ResilientCheckpoint, points
from lightning_resilience.manifest import Manifest
from lightning_resilience.named_optimizers import read_numbered
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.staging import Staging
from lightning_resilience.store import list_checkpoints, verify
from lightning_resilience.tiers import LocalTier

Found = dict[str, Any]
"""What a check found, for the document."""

STRATEGIES: Mapping[str, Callable[[], Any]] = {
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}, use_orig_params=True),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
}
MOST_STALL = {"behind": 0.1, "at once": 1.3}
"""Of copying the bytes from the device to locked memory: what a save may keep the training thread."""
STEPS = 12


class Model(L.LightningModule):
    """Layers with dropout and a batch norm; a buffer that follows the inputs is changed in the forward as well."""

    def __init__(self, width: int = 512, depth: int = 4, clamps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.clamps = clamps
        layers = (nn.Linear(width, width) for _ in range(depth))
        self.net = nn.Sequential(*layers, nn.BatchNorm1d(width), nn.Dropout(0.1))
        self.register_buffer("seen", torch.zeros(width))
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not hasattr(self.net, "set_requires_gradient_sync"):
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.clamps:
            with torch.no_grad():
                self.net[0].weight.clamp_(-0.5, 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.add_(batch[0].mean(0).detach())
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.losses.append(loss.detach())
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


class Dies(L.Callback):
    """Is killed in the middle; before that, keeps the losses for the one after it."""

    def __init__(self, step: int, losses: Path) -> None:
        self.step = step
        self.losses = losses

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.losses.write_text(json.dumps([float(loss) for loss in model.losses]))
            os.kill(os.getpid(), signal.SIGKILL)


class Times(L.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        synchronize()
        now = time.perf_counter()
        if self._began:
            self.seconds.append(now - self._began)
        self._began = now


class Stalls(DummyLogger):
    """Seconds that each save kept the training thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "resilience/stall_seconds" in metrics:
            self.seconds.append(metrics["resilience/stall_seconds"])


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


class Told(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Told:
        logger = logging.getLogger("lightning_resilience")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("lightning_resilience")
        logger.setLevel(self._level)
        logger.removeHandler(self)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def data(width: int, steps: int = STEPS, batch: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(steps * batch, width, generator=generator)), batch_size=batch)


def fit(
    folder: Path,
    model: Model,
    *,
    accelerator: str,
    strategy: Any = "auto",
    steps: int = STEPS,
    resume: bool = False,
    callbacks: tuple[L.Callback, ...] = (),
    logger: Any = False,
    **kwargs: Any,
) -> None:
    """Train, with a save at each third step."""
    L.seed_everything(0, verbose=False)
    saver = ResilientCheckpoint(
        folder, schedule=EverySteps(3), **{"on_save_error": "raise", "keep": Keep(last=-1), **kwargs}
    )
    trainer = L.Trainer(
        accelerator=accelerator, devices=1, strategy=strategy, max_epochs=1, max_steps=steps, logger=logger,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Settle(saver), saver, *callbacks],
        default_root_dir=folder, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data(model.seen.numel()), ckpt_path="last" if resume else None)


def committed(folder: Path) -> dict[str, Manifest]:
    found = list_checkpoints(LocalTier(folder)).committed
    for name, manifest in found.items():
        assert not verify(LocalTier(folder), name, manifest), f"{name} is damaged"
    return found


def content(path: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(lambda file: path / file, plain=True)
    tensors = {f"model.{name}": value for name, value in reader.read_full().items() if isinstance(value, Tensor)}
    for name, entry in read_numbered(reader, 0)["state"].items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in entry.items() if isinstance(value, Tensor)}
    return tensors


def check_same(one: list[float], other: list[float]) -> Found:
    assert len(one) == len(other) == STEPS, f"{len(one)} and {len(other)} steps"
    assert one == other, f"{sum(a != b for a, b in zip(one, other, strict=True))} losses differ"
    return {"steps": len(one)}


def losses_of(*models: Model) -> list[float]:
    return [float(loss) for model in models for loss in model.losses]


def train_until_killed(folder: Path, accelerator: str, losses: Path) -> None:
    quietly()
    fit(folder, Model(), accelerator=accelerator, callbacks=(Dies(8, losses),))


class Checks:
    """What is looked at, each in a folder of its own.

    Args:
        accelerator: ``cuda``; ``cpu`` where the script is rehearsed.
        strategies: how ``fsdp`` and ``fsdp2`` are made.
        gib: of the state whose stall is measured.
        most_stall: see ``MOST_STALL``.
    """

    def __init__(
        self,
        accelerator: str = "cuda",
        strategies: Mapping[str, Callable[[], Any]] = STRATEGIES,
        gib: float = 8.0,
        most_stall: Mapping[str, float] = MOST_STALL,
    ) -> None:
        self._gib = gib
        self._most_stall = most_stall
        self._accelerator = accelerator
        self._fit = partial(fit, accelerator=accelerator)
        self.by_name: dict[str, Callable[[Path], Found]] = {
            "single": self._single,
            "resume": self._resume,
            "killed": self._killed,
            "clamp": self._clamp,
            "stall": self._stall,
        }
        for name, strategy in strategies.items():  # last: they leave a process group
            self.by_name[name] = partial(self._same_as_at_once, strategy=strategy)
            self.by_name[f"{name}-resume"] = partial(self._resume, strategy=strategy)

    def _single(self, root: Path) -> Found:
        found = self._same_as_at_once(root)
        assert found["behind"] >= 3, "nothing was copied behind the training thread"
        return found

    def _same_as_at_once(self, root: Path, strategy: Callable[[], Any] = lambda: "auto") -> Found:
        with Counted() as counted:
            self._fit(root / "behind", Model(), strategy=strategy())
        self._fit(root / "at-once", Model(), strategy=strategy(), overlap_staging=False)
        names = committed(root / "at-once")
        assert names.keys() == committed(root / "behind").keys(), "other checkpoints"
        for name in names:
            one, other = content(root / "at-once" / name), content(root / "behind" / name)
            assert one.keys() == other.keys(), "other tensors"
            wrong = [key for key in one if not torch.equal(one[key], other[key])]
            assert not wrong, f"{name}: {wrong[:3]} of {len(wrong)} differ"
        return {"checkpoints": len(names), "tensors": len(one), "behind": counted.count}

    def _resume(self, root: Path, strategy: Callable[[], Any] = lambda: "auto") -> Found:
        whole, first, second = Model(), Model(), Model()
        self._fit(root / "whole", whole, strategy=strategy())
        self._fit(root / "parts", first, strategy=strategy(), steps=6)
        self._fit(root / "parts", second, strategy=strategy(), resume=True)
        return check_same(losses_of(whole), losses_of(first, second))

    def _killed(self, root: Path) -> Found:
        root.mkdir()
        whole, second = Model(), Model()
        self._fit(root / "whole", whole)
        losses = root / "losses.json"
        process = multiprocessing.get_context("spawn").Process(
            target=train_until_killed, args=(root / "parts", self._accelerator, losses)
        )
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, f"ended with {process.exitcode}"
        with Told() as told:
            self._fit(root / "parts", second, resume=True)
        [line] = [line for line in told.lines if re.search(r"event=resume step=\d", line)]
        assert "memory" in line, f"not from memory: {line}"
        before = json.loads(losses.read_text())[:6]
        return {**check_same(losses_of(whole), [*before, *losses_of(second)]), "line": line}

    def _clamp(self, root: Path) -> Found:
        late = points.listen(lambda name: time.sleep(0.3) if name == "stage.piece" else None)
        with Counted() as counted:
            self._fit(root, Model(clamps=True), on_save_error="warn")
        late()
        steps = sorted(manifest.step for manifest in committed(root).values())
        assert counted.count == 1, f"{counted.count} copies behind the training thread"
        assert steps == [6, 9, 12], f"committed: {steps}"
        return {"committed": steps}

    def _stall(self, root: Path) -> Found:
        width = 4096 if self._gib >= 1 else 256
        depth = max(int(self._gib * 2**30 / (12 * width * width)), 1)
        found: dict[str, Any] = {}
        for name, choice in (("behind", "auto"), ("at once", False)):
            stalls, times, folder = Stalls(), Times(), root / name.replace(" ", "-")
            model, watch = Model(width, depth), {"logger": stalls, "callbacks": (times,)}
            self._fit(folder, model, overlap_staging=choice, keep=Keep(last=1), **watch)
            steady = stalls.seconds[1:-1]  # the first makes the slots, the last has no step after it
            found[name] = {
                "stalls": stalls.seconds,
                "median": statistics.median(steady),
                "bytes": next(iter(committed(folder).values())).size,
                "step": statistics.median(times.seconds),
            }
        limit = copy_to_host(found["behind"]["bytes"], self._accelerator)
        ratios = {name: entry["median"] / limit for name, entry in found.items()}
        for name, most in self._most_stall.items():
            assert ratios[name] <= most, f"{name}: the stall is {ratios[name]:.2f} of the copy ({limit:.3f} s)"
        return {"limit": limit, "ratios": ratios, **found}


def copy_to_host(size: int, device: str) -> float:
    """Seconds for so many bytes into memory that is there, locked where that helps; the median of five."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    seconds = []
    for _ in range(6):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def quietly() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in each process


def run(checks: Mapping[str, Callable[[Path], Found]]) -> dict[str, Found]:
    """Run checks, whatever becomes of them."""
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, check in checks.items():
            begin = time.monotonic()
            try:
                result: Found = {"ok": True, **check(Path(folder) / name)}
            except BaseException as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            result["seconds"] = round(time.monotonic() - begin, 1)
            results[name] = result
            print(f"{name}: {'ok' if result['ok'] else result['error']} ({result['seconds']} s)", flush=True)
    return results


def main() -> int:
    names = Checks().by_name
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="state whose stall is measured (default 8)")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), help="checks to run (default all)")
    parser.add_argument("--json", type=Path, help="write the document to this file too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    quietly()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    checks = Checks(gib=options.gib).by_name
    results = run({name: checks[name] for name in options.only})
    document = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "checks": results}
    text = json.dumps(document, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
