"""The samples and losses of an interrupted run beside those of one that was left alone.

    python examples/exact_resume.py

Everything that usually differs after a resume is in it: shuffling, loader workers, augmentation, dynamic masking whose
state lives in the collate function, dropout, a scheduler, gradient accumulation.  Three comparisons: one process; two
ranks under torchrun; and two ranks that are resumed by one, where each remaining sample must come exactly once.  The
training script is ``train``; by hand it is

    torchrun --nproc_per_node 2 examples/exact_resume.py --train FOLDER [--kill-after BATCHES]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_resilience import EverySteps, ResilientCheckpoint

SAMPLES, BATCH, EPOCHS, KILL_AFTER = 48, 4, 2, 9


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples with random noise, drawn in the loader's workers."""

    def __init__(self) -> None:
        self.features = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index), "x": self.features[index] + 0.1 * torch.randn(16)}


class DynamicMasking:
    """A collate function with a state: it masks more and more features.

    ``state_dict`` and ``load_state_dict`` are all that is needed; in datasets and their transforms they are found too.
    """

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = default_collate(samples)
        self.batches += 1
        batch["x"][torch.rand_like(batch["x"]) < min(0.01 * self.batches, 0.5)] = 0
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Model(L.LightningModule):
    """Writes the samples and the loss of every batch to a file of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["x"].sum(1, keepdim=True))
        folder = Path(self.trainer.default_root_dir)
        with open(folder / f"rank-{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch["id"].tolist(), loss.item()]) + "\n")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Kill(L.Callback):
    """Kills the process as a power cut would, in the middle of a batch, once there is a checkpoint to go on from."""

    def __init__(self, after: int | None, checkpoints: Path) -> None:
        self.after = after
        self.checkpoints = checkpoints

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.after:
            while not list(self.checkpoints.glob("*.ckpt/manifest.json")):
                time.sleep(0.01)  # it is written in the background, and these steps are short
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_after: int | None) -> None:
    """The script that a user would write."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        callbacks=[
            ResilientCheckpoint(folder / "checkpoints", schedule=EverySteps(1)),
            Kill(kill_after, folder / "checkpoints"),
        ],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2, collate_fn=DynamicMasking())
    trainer.fit(Model(), loader, ckpt_path="last")


# -- the comparison ---------------------------------------------------------------------------------------------------


def launch(folder: Path, ranks: int, kill_after: int | None = None) -> None:
    """Run ``train`` on so many ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, __file__, "--train", str(folder)]
    if kill_after is not None:
        command += ["--kill-after", str(kill_after)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if (result.returncode == 0) != (kill_after is None):
        sys.exit(f"{' '.join(command)} ended with status {result.returncode}:\n{result.stderr[-4000:]}")


def batches(folder: Path, ranks: int) -> dict[tuple[int, int], list[Any]]:
    """``[ids, loss]`` of each rank, by epoch and batch; a batch that was trained twice counts the second time."""
    found: dict[tuple[int, int], list[Any]] = {}
    for rank in range(ranks):
        for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
            epoch, batch, ids, loss = json.loads(line)
            found.setdefault((epoch, batch), [None] * ranks)[rank] = [ids, loss]
    return found


def compare(root: Path, ranks: int) -> bool:
    """Interrupted and resumed on the same ranks: is it the same run?"""
    print(f"\n{ranks} {'ranks, under torchrun' if ranks > 1 else 'process'}: killed in batch {KILL_AFTER}, resumed\n")
    launch(root / "broken", ranks, KILL_AFTER)
    launch(root / "broken", ranks)
    launch(root / "whole", ranks)
    broken, whole = batches(root / "broken", ranks), batches(root / "whole", ranks)
    print("    epoch batch   samples, interrupted       loss        samples, left alone        loss")
    for place in sorted(whole):
        for one, other in zip(broken[place], whole[place], strict=True):
            note = "" if one == other else "   <- differs"
            print("    {:5d} {:5d}   {!s:22} {:12.8f}    {!s:22} {:12.8f}{}".format(*place, *one, *other, note))
    equal = broken == whole
    print(f"\n    Samples and losses are {'equal, bit for bit' if equal else 'NOT EQUAL'}.")
    return equal


def resume_on_one(root: Path) -> bool:
    """Interrupted on two ranks, resumed by one: does each sample come once?"""
    stop = KILL_AFTER // 2
    print(f"\n2 ranks, killed in batch {stop}, resumed by 1\n")
    launch(root, 2, stop)
    two = batches(root, 2)
    (root / "rank-0.jsonl").unlink()
    launch(root, 1)
    one = batches(root, 1)
    first = min(one)
    saved = (
        (SAMPLES - sum(len(ids) for (epoch, _), ranks in one.items() if epoch == 0 for ids, _ in ranks)) // BATCH // 2
    )
    samples = [(f"2 ranks, batch {place[1]}", ids) for place in sorted(two)[:saved] for ids, _ in two[place]]
    samples += [(f"1 rank, batch {place[1]}", ids) for place in sorted(one) if place[0] == 0 for ids, _ in one[place]]
    for who, ids in samples:
        print(f"    {who:18} {ids}")
    once = sorted(sample for _, ids in samples for sample in ids) == list(range(SAMPLES))
    print(f"\n    Resumed at batch {first[1]}. Each of the {SAMPLES} samples came {'once' if once else 'NOT ONCE'}.")
    return once


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; a new temporary folder if not given")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="train only")
    parser.add_argument("--kill-after", type=int, help="with --train: the batch to be killed in")
    arguments = parser.parse_args()
    if arguments.train:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        train(arguments.train.absolute(), arguments.kill_after)
    else:
        place = (arguments.folder or Path(tempfile.mkdtemp(prefix="exact-resume-"))).absolute()
        good = [compare(place / "one", 1), compare(place / "two", 2), resume_on_one(place / "other")]
        sys.exit(0 if all(good) else 1)
