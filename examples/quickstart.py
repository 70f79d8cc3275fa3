"""Kill a training run, start it again, and see it go on as if nothing had happened.

    python examples/quickstart.py

Trains a small GPT in a child process that kills itself with SIGKILL in the middle, starts the same script again with
``ckpt_path="last"``, and prints its losses beside those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L

from gpt import GPT, SourceText
from lightning_resilience import EverySteps, ResilientCheckpoint

STEPS, SAVE_EVERY, KILL_AFTER = 100, 20, 71


def train(folder: Path, steps: int, kill_after: int | None) -> None:
    """The script that a user would write.  The line that makes it resilient is marked."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=[
            ResilientCheckpoint(dirpath=folder / "checkpoints", schedule=EverySteps(SAVE_EVERY)),  # <- this one
            Losses(folder / "losses.csv", kill_after),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), datamodule=SourceText(), ckpt_path="last")


class Losses(L.Callback):
    """Appends each step's loss to a file, and kills the process after a step."""

    def __init__(self, file: Path, kill_after: int | None) -> None:
        self.file = open(file, "a", buffering=1)  # noqa: SIM115  # closed when the process ends, however it does
        self.kill_after = kill_after

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.file.write(f"{trainer.global_step},{outputs['loss'].item()!r}\n")
        if trainer.global_step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, steps: int, kill_after: int | None, title: str) -> list[str]:
    """Run ``train`` in a child process; its log lines."""
    print(f"\n{title}")
    command = [sys.executable, __file__, "--child", str(folder), "--steps", str(steps)]
    if kill_after is not None:
        command += ["--kill-after", str(kill_after)]
    begin = time.monotonic()
    child = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in child.stderr.splitlines() if "lightning_resilience" in line]
    for line in lines:
        print(f"    {line.replace('lightning_resilience', '').strip(': ').replace(str(folder) + os.sep, '')}")
    status = "killed" if child.returncode == -signal.SIGKILL else f"exit status {child.returncode}"
    print(f"    ({status} after {time.monotonic() - begin:.1f} s, with start-up)")
    if child.returncode not in (0, -signal.SIGKILL):
        sys.exit(child.stderr)
    return lines


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss in the order they were trained, a repeated step twice."""
    with open(folder / "losses.csv") as file:
        return [(int(step), float(loss)) for step, loss in csv.reader(file)]


def main(root: Path, steps: int, kill_after: int) -> int:
    """The demonstration; 0 if the interrupted run has the losses of the other."""
    broken, whole = root / "interrupted", root / "uninterrupted"
    for folder in (broken, whole):
        folder.mkdir(parents=True)
    print(f"A small GPT on Python's standard library, {steps} steps, a checkpoint every {SAVE_EVERY}. Files: {root}")
    run(broken, steps, kill_after, f"1. Train; SIGKILL after step {kill_after}:")
    run(broken, steps, None, '2. Start the same script again, ckpt_path="last":')
    run(whole, steps, None, "3. For comparison, the same run left alone:")

    trained = losses(broken)
    lost = len(trained) - len({step for step, _ in trained})
    killed_at = next(i for i, (step, _) in enumerate(trained) if step == kill_after)
    resumed_from = trained[killed_at + 1][0] - 1
    interrupted, uninterrupted = dict(trained), dict(losses(whole))
    print(f"\nKilled after step {kill_after}, resumed from step {resumed_from}: {lost} steps lost and trained again.\n")
    print("     step   loss, interrupted   loss, left alone")
    shown = {1, resumed_from - 1, resumed_from, resumed_from + 1, resumed_from + 2, kill_after, kill_after + 1, steps}
    for step in sorted(shown & uninterrupted.keys()):
        note = "  <- last step before the resume" if step == resumed_from else ""
        note = "  <- killed after this step" if step == kill_after else note
        print(f"    {step:5d}   {interrupted[step]:17.6f}   {uninterrupted[step]:16.6f}{note}")
    worst = max(abs(interrupted[step] - uninterrupted[step]) for step in uninterrupted)
    same = "every loss is the same, bit for bit" if worst == 0 else f"the largest difference is {worst:.2e}"
    print(f"\nOver all {len(uninterrupted)} steps {same}.")
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; a new temporary folder if not given")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill-after", type=int)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        train(arguments.child, arguments.steps, arguments.kill_after)
    else:
        place = arguments.folder or Path(tempfile.mkdtemp(prefix="quickstart-"))
        sys.exit(main(place.absolute(), arguments.steps, arguments.kill_after or KILL_AFTER * arguments.steps // STEPS))
