"""What is saved: a model and its AdamW moments, and a training step that changes all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 8
WIDTH = 1024


class TrainingState:
    """Parameters in residual layers with AdamW, the same on every rank.

    Args:
        size: bytes of parameters and moments together.
        tensors: number of parameters and moments together, all of one size.
    """

    def __init__(self, size: int, tensors: int) -> None:
        count = max(tensors // 3, 1)
        elements = max(size // 4 // (3 * count), 1)
        width = min(elements, WIDTH)
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(max(elements // width, 1), width, generator=generator) * 0.02
        self.parameters = {f"layers.{i}.weight": nn.Parameter(block.roll(i)) for i in range(count)}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-4, fused=True)
        self._input = torch.randn(BATCH, width, generator=generator)
        for parameter in self.parameters.values():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.size = sum(tensor.nbytes for tensor in self.large())

    def large(self) -> list[Tensor]:
        """Parameters and moments, without the step counters."""
        return [tensor.detach() for _, tensor in self.flat() if tensor.dim()]

    def flat(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its flat key."""
        for name, parameter in self.parameters.items():
            yield f"model.{name}", parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer_0.state.{name}.{key}", value

    def nested(self) -> dict[str, Any]:
        """References to the live state, nested and named as strategies give it to a checkpoint."""
        states = {name: dict(self.optimizer.state[parameter]) for name, parameter in self.parameters.items()}
        groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01, "params": list(self.parameters)}]
        return {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer_0": {"state": states, "param_groups": groups},
        }

    def forward_backward(self) -> None:
        """The part of a training step that reads parameters and moments but does not change them."""
        x = self._input
        for parameter in self.parameters.values():
            x = x + torch.relu(x @ parameter.t()) @ parameter * 0.1
        self.optimizer.zero_grad(set_to_none=False)
        x.square().mean().backward()

    def update(self) -> None:
        """The part of a training step that changes them."""
        self.optimizer.step()

    def digest(self) -> Tensor:
        """One number a tensor; other contents give other numbers, as far as a benchmark needs to know."""
        return torch.stack([tensor.detach().double().norm() + tensor.reshape(-1)[-1] for _, tensor in self.flat()])

    @torch.no_grad()
    def wipe(self) -> None:
        """Zero everything, so that a restore has something to do."""
        for _, tensor in self.flat():
            tensor.zero_()
