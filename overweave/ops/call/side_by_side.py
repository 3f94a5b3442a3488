"""What callers list as x and w: several products whose sum is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import names_with_form
from overweave.ir.problem import LONGEST_LIST
from overweave.ops.call.operands import FP8, CallArguments, check_operands, check_plain
from overweave.runtime.library.two_parts import add_products, lay_side_by_side

SideBySideWeights = list[torch.Tensor] | tuple[torch.Tensor, ...]  # of several products, as callers list them


def side_by_side(operator: Operator, given: CallArguments, ranks: int) -> CallArguments:
    """What was passed, with the x and w of one product in place of the lists; or the sum itself, as `y`.

    The sum: of a group of one where nothing else is asked for, no epilogue, no plan by name and no products of fp8. The
    library adds product to product then. Raises InputError.
    """
    xs, ws = given["x"], given["w"]
    check_pairs(operator, xs, ws)
    is_bare = all(each is None for name, each in given.items() if name not in ("x", "w"))
    if ranks == 1 and is_bare and xs[0].dtype != FP8:
        return {"y": add_products(xs, ws)}
    return given | lay_side_by_side(xs, ws)


def check_pairs(operator: Operator, xs: Sequence[Any], ws: Any) -> None:
    """Raises InputError for products that cannot be added."""
    name = operator.name
    if not operator.forms.several_products:
        only = names_with_form("several_products")
        raise InputError(f"{name}: x", f"got a list of {len(xs)}", f"Pass a tensor: only {only} add several")
    if not isinstance(ws, (list, tuple)) or len(ws) != len(xs) or not 1 <= len(xs) <= LONGEST_LIST:
        found = f"got {len(xs)} of x, {len(ws) if isinstance(ws, (list, tuple)) else 'one'} of w"
        raise InputError(f"{name}: x and w, lists of one length", found, f"Pass 1 to {LONGEST_LIST} pairs")
    for index, (x, w) in enumerate(zip(xs, ws, strict=True)):
        check_plain(f"{name}: x[{index}]", x)
        check_plain(f"{name}: w[{index}]", w)
        check_operands(name, x, w)
    if len({(x.shape[0], w.shape[1], x.dtype, x.device) for x, w in zip(xs, ws, strict=True)}) > 1:
        found = ", ".join(f"{list(x.shape)} @ {list(w.shape)}" for x, w in zip(xs, ws, strict=True))
        raise InputError(f"{name}: products of one shape and dtype", found, "Pass factors whose products can be added")
