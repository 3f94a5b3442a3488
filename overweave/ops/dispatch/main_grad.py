"""Gradients accumulated in `weight.main_grad`, as Megatron-LM keeps them in fp32, instead of `weight.grad`."""

from __future__ import annotations

from typing import Any

import torch

from overweave.errors import InputError


class _IntoMainGrad(torch.autograd.Function):
    """The identity of a weight; its backward adds the gradient to `weight.main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weight, (gradient,) = ctx.weight, gradients
        weight.main_grad.add_(gradient.detach())  # which has a history under create_graph=True
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # SOURCE: Megatron-LM, core/tensor_parallel/layers.py: hooks of the weight need some gradient to run; by this
        # mark they ignore its values.
        weight.grad_added_to_main_grad = True
        return torch.empty_like(gradient)


def added_to_main_grad(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight; its gradient is added to `weight.main_grad`, and `weight.grad` stays None.

    Raises InputError if `weight.main_grad` is no tensor of its shape.
    """
    main = getattr(weight, "main_grad", None)
    if not isinstance(main, torch.Tensor) or main.shape != weight.shape:
        found = "there is none" if main is None else f"it is {getattr(main, 'shape', type(main).__name__)}"
        raise InputError(
            f"{name}: weight.main_grad", found, f"Make one of {list(weight.shape)}, or pass main_grad=False"
        )
    into: Any = _IntoMainGrad
    return into.apply(weight) if weight.requires_grad and torch.is_grad_enabled() else weight
