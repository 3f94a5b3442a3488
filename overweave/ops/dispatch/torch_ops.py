"""Defines ops of torch that are not operators: kernel, fake kernel and gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

from overweave.compat.torch_names import is_any_autocast_enabled
from overweave.errors import InputError
from overweave.ops.dispatch.schema import NAMESPACE
from overweave.runtime.library.library import without_autocast

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class TorchOp(NamedTuple):
    """An op of torch. arguments: its schema without the name. run: its kernel. fake: shapes and dtypes of its results.

    backward, keep: gradient and `setup_context`, as of torch.library.register_autograd; None: not differentiable.
    is_twice_differentiable: whether backward consists of differentiable operations, on every device; else it is refused
    under `create_graph=True`.
    """

    name: str
    arguments: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    keep: Callable[..., None] | None = None
    is_twice_differentiable: bool = False


def define(op: TorchOp) -> None:
    """Define an op. By `Library.define`: the Python wrapper of `custom_op` would be most of a call's host time."""
    _LIBRARY.define(f"{op.name}{op.arguments}")
    _LIBRARY.impl(op.name, _without_autocast(op.run), "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{op.name}"
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.backward is not None:
        backward = op.backward if op.is_twice_differentiable else _refuse_double_backward(op.name, op.backward)
        torch.library.register_autograd(qualified, backward, setup_context=op.keep, lib=_LIBRARY)


def _refuse_double_backward(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward: it raises InputError under `create_graph=True`, where gradients of it would lack a part."""

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            cure = "Leave out create_graph=True: this op has no gradients of gradients"
            raise InputError(f"differentiate {NAMESPACE}.{name} twice", "backward is asked for a graph", cure)
        return backward(ctx, *gradients)

    return refusing


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel to run without autocast, which would cast operands of inner matmuls on some devices and plans."""

    @wraps(run)
    def kernel(*tensors: Any, **options: Any) -> Any:
        if not is_any_autocast_enabled():
            return run(*tensors, **options)
        with without_autocast():
            return run(*tensors, **options)

    return kernel
