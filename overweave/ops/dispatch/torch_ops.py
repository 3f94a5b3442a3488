"""How an op that is no operator is defined for torch: what it runs, what it is without data, and its gradient."""

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
    """An op in all that torch wants of it. arguments: its schema behind the name. fake: shapes and dtypes of what it
    returns. backward, keep: of its gradient, where it has one. is_twice_differentiable: whether backward consists of
    differentiable operations alone, on every device; else it is refused under `create_graph=True`."""

    name: str
    arguments: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    keep: Callable[..., None] | None = None
    is_twice_differentiable: bool = False


def define(op: TorchOp) -> None:
    """Defines an op. `Library.define`, not `custom_op`, whose own Python would be most of the host time of a call."""
    _LIBRARY.define(f"{op.name}{op.arguments}")
    _LIBRARY.impl(op.name, _in_dtypes_given(op.run), "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{op.name}"
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.backward is not None:
        backward = op.backward if op.is_twice_differentiable else _once(op.name, op.backward)
        torch.library.register_autograd(qualified, backward, setup_context=op.keep, lib=_LIBRARY)


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises InputError where torch would record it, and gradients of it would lack a part."""

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            cure = "Leave out create_graph=True: this op has no gradients of gradients"
            raise InputError(f"differentiate {NAMESPACE}.{name} twice", "backward is asked for a graph", cure)
        return backward(ctx, *gradients)

    return refusing


def _in_dtypes_given(run: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast, which would cast factors of matmuls inside on some devices, and by some plans."""

    @wraps(run)
    def kernel(*tensors: Any, **options: Any) -> Any:
        if not is_any_autocast_enabled():
            return run(*tensors, **options)
        with without_autocast():
            return run(*tensors, **options)

    return kernel
