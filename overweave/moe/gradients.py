"""The gradients of a grouped matmul: of x, w, gate, bias and the weights of rows, by grouped matmuls.

With z = x[rows] @ w[e] (+ bias), v = act(z), or z * act(x[rows] @ gate[e]), and y[into] = s * v, where g is y's:

    dv = s * g[into]    dz = dv * act'(z)    dx[rows] += dz @ w[e].T    dw[e] = x[rows].T @ dz of the group
    ds = (g[into] * v).sum(1), or without activation and gate (x[rows] * (g[into] @ w[e].T)).sum(1) + g[into] @ bias[e]

What activations and gates need is computed anew: it would be as large as the result.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.runtime.library import grouped as reference
from overweave.runtime.library.grouped import Grouped

Grads = tuple[torch.Tensor | None, ...]
_NOT_DIFFERENTIABLE = "overweave.moe.grouped_matmul has no gradients of fp8; multiply in bf16 where x or w needs one"


def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Saves what the gradients read."""
    call = Grouped(*inputs)
    tensors = [getattr(call, name) for name in _TENSORS]
    ctx.save_for_backward(*tensors)
    ctx.activation, ctx.out_dtype = call.activation, call.out_dtype


_TENSORS = ("x", "w", "offs", "bias", "gate", "rows", "into", "row_weights", "scale_x", "scale_w")


def backward(ctx: Any, grad: torch.Tensor) -> Grads:
    """The gradients of all arguments, in their order."""
    tensors = dict(zip(_TENSORS, ctx.saved_tensors, strict=True))
    call = Grouped(**tensors, activation=ctx.activation, out_dtype=ctx.out_dtype)
    if call.scale_x is not None:
        raise NotImplementedError(_NOT_DIFFERENTIABLE)
    needs = dict(zip(Grouped._fields, ctx.needs_input_grad, strict=True))
    found = _of_products(call, grad.contiguous(), needs)
    return tuple(found.get(name) if needs[name] else None for name in Grouped._fields)


def _of_products(call: Grouped, grad: torch.Tensor, needs: dict[str, bool]) -> dict[str, torch.Tensor | None]:
    """The gradients by name. Where something is done to products, these are computed anew."""
    g = grad.to(call.x.dtype) if call.into is None else _rows_of(grad, call.into).to(call.x.dtype)
    found: dict[str, torch.Tensor | None] = {}
    is_plain = call.gate is None and not call.activation
    if is_plain:
        parts = [(call.w, g)]
        dv = g
    else:
        parts, dv = _through(call, g, found)
    if needs["x"] or (is_plain and needs["row_weights"]):
        found |= _of_x(call, parts, dv if is_plain else None, is_weighed=is_plain)
    if needs["w"] or needs["gate"] or needs["bias"]:
        found |= _of_weights(call, parts, is_weighed=is_plain)
    return found


def _through(
    call: Grouped, g: torch.Tensor, found: dict[str, torch.Tensor | None]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Back through row weights, activation and gate: each weight with what its product's gradient is."""
    z = _matmul(call.x, call.w, call.offs, bias=call.bias, rows=call.rows).float()
    dv, weights = g.float(), call.row_weights
    if call.gate is None:
        value, slope = _activated(z, call.activation)
        parts = [(call.w, slope)]
    else:
        gate = _matmul(call.x, call.gate, call.offs, rows=call.rows).float()
        of_gate, slope = _activated(gate, call.activation)
        value, parts = z * of_gate, [(call.w, of_gate), (call.gate, z * slope)]
    if weights is not None:
        found["row_weights"] = torch.where(_is_row(call), (dv * value).sum(1), 0.0)
        dv = dv * weights.unsqueeze(1)
    return [(w, (dv * slope).to(call.x.dtype)) for w, slope in parts], dv


def _of_x(
    call: Grouped, parts: list[tuple[torch.Tensor, torch.Tensor]], g: torch.Tensor | None, is_weighed: bool
) -> dict[str, torch.Tensor | None]:
    """Of x, and of the weights of rows where these alone follow the product. g: then y's gradient."""
    dx = (
        torch.stack([_matmul(dz, w.transpose(1, 2), call.offs) for w, dz in parts]).sum(0)
        if len(parts) > 1
        else (_matmul(parts[0][1], parts[0][0].transpose(1, 2), call.offs))
    )
    found: dict[str, torch.Tensor | None] = {}
    if is_weighed and call.row_weights is not None and g is not None:
        x = call.x if call.rows is None else _rows_of(call.x, call.rows)
        own = (x.float() * dx.float()).sum(1)
        if call.bias is not None:
            own = own + (_matmul(g, call.bias.to(g.dtype).unsqueeze(2), call.offs, out_dtype=torch.float32)).squeeze(1)
        found["row_weights"] = torch.where(_is_row(call), own, 0.0)
        dx = (dx.float() * call.row_weights.unsqueeze(1)).to(dx.dtype)
    if call.rows is None:
        torch.ops.overweave.grouped_rest_cleared(dx, call.offs)
        found["x"] = dx
    else:
        found["x"] = _scattered(call, dx)
    return found


def _of_weights(
    call: Grouped, parts: list[tuple[torch.Tensor, torch.Tensor]], is_weighed: bool
) -> dict[str, torch.Tensor | None]:
    x = call.x if call.rows is None else _rows_of(call.x, call.rows)
    found: dict[str, torch.Tensor | None] = {}
    for name, (_, dz) in zip(("w", "gate"), parts, strict=False):
        if is_weighed and call.row_weights is not None:
            dz = (dz.float() * call.row_weights.unsqueeze(1)).to(dz.dtype)
        found[name] = torch.ops.overweave.grouped_outer(x, dz, call.offs)
        if name == "w" and call.bias is not None:
            ones = torch.ones(dz.shape[0], 16, dtype=dz.dtype, device=dz.device)
            found["bias"] = torch.ops.overweave.grouped_outer(ones, dz, call.offs)[:, 0].to(call.bias.dtype)
    return found


def _matmul(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, bias: Any = None, rows: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    arguments = (x, w, offs, bias, None, "", rows, None, None, None, None, out_dtype or x.dtype)
    return torch.ops.overweave.grouped_matmul(*arguments)  # type: ignore[no-any-return]


def _activated(z: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation's values and slopes."""
    if not activation:
        return z, torch.ones_like(z)
    if activation == "silu":
        share = torch.sigmoid(z)
        return z * share, share * (1 + z * (1 - share))
    slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=_APPROXIMATE[activation])
    return reference.activated(z, activation), slope


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _is_row(call: Grouped) -> torch.Tensor:
    """Which rows of the product are some expert's."""
    return torch.arange(call.pairs, device=call.x.device) < call.offs[-1]


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows by index; those out of range are the nearest one's."""
    return x.index_select(0, rows.clamp(0, max(0, x.shape[0] - 1)))


def _scattered(call: Grouped, dx: torch.Tensor) -> torch.Tensor:
    """Rows added to those that they were gathered from, in fp32 and in a fixed order."""
    assert call.rows is not None
    rows, count = call.rows, call.x.shape[0]
    is_known = _is_row(call) & (rows >= 0) & (rows < count)
    places = torch.where(is_known, rows, count).long()  # one more row takes what belongs to none
    total = torch.zeros(count + 1, dx.shape[1], dtype=torch.float32, device=dx.device)
    return total.index_put((places,), dx.float(), accumulate=True)[:count].to(dx.dtype)
