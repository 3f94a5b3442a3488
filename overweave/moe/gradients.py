"""The gradients of a grouped matmul: of x, w, gate, bias and the weights of rows, by grouped matmuls.

With z = x[rows] @ w[e] (+ bias) of w, and of a gate, v = what the epilogue makes of them, and y[into] = s * v, where g
is y's:

    dv = s * g[into]    dz = dv * v'(z)    dx[rows] += dz @ w[e].T    dw[e] = x[rows].T @ dz of the group
    ds = (g[into] * v).sum(1), or without an epilogue (x[rows] * (g[into] @ w[e].T)).sum(1) + g[into] @ bias[e]

What activations and gates need is computed anew: it would be as large as the result.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.runtime.library.epilogue import ended
from overweave.runtime.library.grouped import Grouped

Grads = tuple[torch.Tensor | None, ...]
_NOT_DIFFERENTIABLE = "overweave.moe.grouped_matmul has no gradients of fp8; multiply in bf16 where x or w needs one"


def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save what the gradients read."""
    call = Grouped(*inputs)
    tensors = [getattr(call, name) for name in _TENSORS]
    ctx.save_for_backward(*tensors)
    ctx.others = {name: getattr(call, name) for name in _OTHERS}


_OTHERS = ("activation", "out_dtype", "gating")
_TENSORS = tuple(name for name in Grouped._fields if name not in _OTHERS)


def backward(ctx: Any, grad: torch.Tensor) -> Grads:
    """Return the gradients of all arguments, in their order."""
    tensors = dict(zip(_TENSORS, ctx.saved_tensors, strict=True))
    call = Grouped(**tensors, **ctx.others)
    if call.scale_x is not None:
        raise NotImplementedError(_NOT_DIFFERENTIABLE)
    needs = dict(zip(Grouped._fields, ctx.needs_input_grad, strict=True))
    found = _of_products(call, grad.contiguous(), needs)
    return tuple(found.get(name) if needs[name] else None for name in Grouped._fields)


def _of_products(call: Grouped, grad: torch.Tensor, needs: dict[str, bool]) -> dict[str, torch.Tensor | None]:
    """Return the gradients by name. Where an epilogue follows the products, these are recomputed."""
    g = (grad if call.into is None else _stored(grad, call.into)).to(call.x.dtype)
    found: dict[str, torch.Tensor | None] = {}
    is_plain = call._replace(bias=None).epilogue.steps == ()
    if is_plain:
        parts = [(call.w, g)]
        dv = g
    else:
        parts, dv = _through(call, g, found)
    if needs["x"] or (is_plain and needs["row_weights"]):
        found |= _of_x(call, parts, dv if is_plain else None, is_weighed=is_plain)
    if any(needs[name] for name in (*call.factors, "bias")):
        found |= _of_weights(call, parts, is_weighed=is_plain)
    return found


def _through(
    call: Grouped, g: torch.Tensor, found: dict[str, torch.Tensor | None]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Differentiate row weights and epilogue: return each weight with the gradient of its product."""
    biases = _biases(call)
    products = [
        _matmul(call.x, w, call.offs, bias=bias, rows=call.rows).float().requires_grad_()
        for w, bias in zip(call.factors.values(), biases, strict=True)
    ]
    with torch.enable_grad():
        value = ended(products[0], slice(None), call._replace(bias=None).epilogue, {}, *products[1:])
    dv, weights = g.float(), call.row_weights
    if weights is not None:
        found["row_weights"] = torch.where(_is_row(call), (dv * value.detach()).sum(1), 0.0)
        dv = dv * weights.unsqueeze(1)
    through = torch.autograd.grad(value, products, dv)
    return [(w, dz.to(call.x.dtype)) for w, dz in zip(call.factors.values(), through, strict=True)], dv


def _biases(call: Grouped) -> list[torch.Tensor | None]:
    """Return the bias of each product."""
    if call.bias is None:
        return [None for _ in call.factors]
    return [each.contiguous() for each in call.bias.view(call.bias.shape[0], len(call.factors), -1).unbind(1)]


def _of_x(
    call: Grouped, parts: list[tuple[torch.Tensor, torch.Tensor]], g: torch.Tensor | None, is_weighed: bool
) -> dict[str, torch.Tensor | None]:
    """Return the gradient of x, and that of the weights of rows if these alone follow the product; then g is y's."""
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
    biases = []
    for name, (_, dz) in zip(call.factors, parts, strict=True):
        if is_weighed and call.row_weights is not None:
            dz = (dz.float() * call.row_weights.unsqueeze(1)).to(dz.dtype)
        found[name] = torch.ops.overweave.grouped_outer(x, dz, call.offs)
        if call.bias is not None:
            ones = torch.ones(dz.shape[0], 16, dtype=dz.dtype, device=dz.device)
            biases.append(torch.ops.overweave.grouped_outer(ones, dz, call.offs)[:, 0])
    if call.bias is not None:
        found["bias"] = torch.stack(biases, 1).view(call.bias.shape).to(call.bias.dtype)
    return found


def _matmul(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, bias: Any = None, rows: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    arguments = (x, w, offs, bias, None, "", rows, None, None, None, None, out_dtype or x.dtype, ())
    return torch.ops.overweave.grouped_matmul(*arguments)  # type: ignore[no-any-return]


def _is_row(call: Grouped) -> torch.Tensor:
    """Return which rows of the product are those of an expert."""
    return torch.arange(call.pairs, device=call.x.device) < call.offs[-1]


def _rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows by index; an index out of range is clamped."""
    return x.index_select(0, rows.clamp(0, max(0, x.shape[0] - 1)))


def _stored(grad: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each row where it was stored; zeros, where its index is out of range: it was not."""
    is_stored = (into >= 0) & (into < grad.shape[0])
    return torch.where(is_stored.unsqueeze(1), _rows_of(grad, into), 0.0)


def _scattered(call: Grouped, dx: torch.Tensor) -> torch.Tensor:
    """Add rows to those that they were gathered from, in fp32 and in a fixed order."""
    assert call.rows is not None
    rows, count = call.rows, call.x.shape[0]
    is_known = _is_row(call) & (rows >= 0) & (rows < count)
    target_rows = torch.where(is_known, rows, count).long()  # one more row takes what belongs to none
    total = torch.zeros(count + 1, dx.shape[1], dtype=torch.float32, device=dx.device)
    return total.index_put((target_rows,), dx.float(), accumulate=True)[:count].to(dx.dtype)
