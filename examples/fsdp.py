"""Sharded training on several ranks: every rank writes its own shard.

    torchrun --nproc_per_node 2 examples/fsdp.py                      # FSDP on GPUs, FSDP2 over gloo without
    torchrun --nproc_per_node 2 --max-restarts 3 examples/fsdp.py     # restarted by torchrun after a crash

Kill it at any time and start it again, also on another number of processes: it goes on from the newest checkpoint.  On
CPUs set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 with --max-restarts (see the README's limits).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy

from gpt import GPT, SourceText
from lightning_resilience import EverySeconds, ResilientCheckpoint


def make_strategy(ranks: int) -> Strategy:
    """FSDP where there are GPUs; ModelParallel with FSDP2 over gloo on CPUs, which FSDPStrategy does not take."""
    if torch.cuda.is_available():
        return FSDPStrategy(state_dict_type="sharded")
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")


class PrintLoss(L.Callback):
    """One line every few steps."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=float, default=5.0, help="seconds between checkpoints")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=make_strategy(ranks),
        max_steps=arguments.steps,
        callbacks=[ResilientCheckpoint(arguments.folder, schedule=EverySeconds(arguments.save_every)), PrintLoss()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), datamodule=SourceText(), ckpt_path="last")
