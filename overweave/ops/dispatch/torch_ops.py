"""How an op that is no operator is defined for torch: what it runs, what it is without data, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from overweave.ops.dispatch.schema import NAMESPACE

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class TorchOp(NamedTuple):
    """An op in all that torch wants of it. arguments: its schema behind the name. fake: shapes and dtypes of what it
    returns. backward, keep: of its gradient, where it has one."""

    name: str
    arguments: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    keep: Callable[..., None] | None = None


def define(op: TorchOp) -> None:
    """Defines an op. `Library.define`, not `custom_op`, whose own Python would be most of the host time of a call."""
    _LIBRARY.define(f"{op.name}{op.arguments}")
    _LIBRARY.impl(op.name, op.run, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{op.name}"
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.backward is not None:
        torch.library.register_autograd(qualified, op.backward, setup_context=op.keep, lib=_LIBRARY)
