"""What stands between the boundary of a module and its first matmul: each takes the input and returns what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def looked(context: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    with context():
        x.abs().max()
    return x


def looked_at_copy(x: torch.Tensor) -> torch.Tensor:
    x.detach().abs().max()
    return x


def hooked_tensor(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 1.0)
    return x


def doubling_hook(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2.0)
    return x


def in_place(x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    return x.mul_(0.5)


def half_in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :, : x.shape[2] // 2] *= 0.5
    return x


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 0.5


def halved(x: torch.Tensor) -> torch.Tensor:
    function: Any = Halved
    return function.apply(x)


def changed_itself(x: torch.Tensor) -> torch.Tensor:
    """In place, where the input is no leaf."""
    return x.mul_(0.5) if x.grad_fn is not None or not x.requires_grad else x * 0.5
