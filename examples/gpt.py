"""What the examples train: a small character-level GPT on text that every machine has, Python's own standard
library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def source_text(characters: int) -> bytes:
    """The beginning of the standard library's sources, as ASCII."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += bytes(byte for byte in path.read_bytes() if byte < 128)
        if len(text) >= characters:
            break
    return text[:characters]


class RandomCrops(Dataset[Tensor]):
    """Random pieces of a text.  They are drawn from torch's generator; an index only counts them."""

    def __init__(self, text: bytes, context: int, size: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        start = int(torch.randint(len(self.text) - self.context - 1, ()))
        return self.text[start : start + self.context + 1].long()


class SourceText(L.LightningDataModule):
    """Batches of random crops.

    Args:
        batch_size: crops a batch, on each rank.
        context: characters that the model sees.
        batches: batches an epoch.
    """

    def __init__(self, batch_size: int = 16, context: int = 64, batches: int = 1000) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Tensor]:
        sizes: Any = self.hparams
        crops = RandomCrops(source_text(1_000_000), sizes.context, sizes.batch_size * sizes.batches)
        return DataLoader(crops, batch_size=sizes.batch_size)


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward net, each with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(L.LightningModule):
    """A GPT on characters.

    Args:
        width: size of the hidden vectors.
        layers: number of transformer layers.
        heads: attention heads a layer.
        context: longest sequence.
        dropout: probability; its randomness is part of what a resume restores.
        lr: learning rate of AdamW.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        context: int = 64,
        dropout: float = 0.1,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.embed, self.position = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.embed.weight  # tied, as in most language models
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def configure_model(self) -> None:
        """Shard every block where the strategy is ModelParallelStrategy (FSDP2)."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or getattr(self, "_sharded", False):
            return
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])
        self._sharded = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
