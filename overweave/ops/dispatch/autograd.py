"""Gradients of the operators, at the Autograd key of torch's dispatcher.

The product, its collective, a bias, a residual and a norm are one node of the graph. An activation and a gate, whose
gradients need what came before them, are computed by torch behind the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.epilogue import BIAS, GATE, NORM_EPS, NORM_WEIGHT, RESIDUAL, SCALE_W, SCALE_X
from overweave.ir.operators.record import Operator
from overweave.ir.shards import shard_rows
from overweave.ops.call.operands import FP8, activation_of
from overweave.ops.call.surroundings import is_watched
from overweave.ops.dispatch.backward import (
    Asked,
    Gradients,
    Kept,
    added_to_shard,
    gradients_of,
    kept_of,
    norm_gradients,
    summed,
)
from overweave.ops.dispatch.route import refused
from overweave.ops.dispatch.schema import Request, beside
from overweave.runtime.library.epilogue import ACTIVATIONS

Kernel = Callable[..., Any]
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Call(NamedTuple):
    """A differentiated call. below: computes it undifferentiated. names: of the tensors beside its xs and its ws."""

    kept: Kept
    below: Kernel
    names: tuple[str, ...]
    xs: int
    ws: int
    options: dict[str, Any]

    def told_apart(self, flat: tuple[Any, ...]) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """xs, ws, and the rest by name."""
        factors = self.xs + self.ws
        return list(flat[: self.xs]), list(flat[self.xs : factors]), dict(zip(self.names, flat[factors:], strict=True))


def autograd_kernel(operator: Operator, op: torch._ops.OpOverload, plain: Kernel) -> Kernel:
    """The kernel of an operator's op for tensors that may be differentiated. plain: that of all others."""
    names = beside(operator)

    def below(*tensors: Any, **options: Any) -> Any:
        with _below_autograd():
            return op(*tensors, **options) if is_watched() else plain(*tensors, **options)

    def kernel(*tensors: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)):
            return below(*tensors, **options)
        xs, ws, *rest = tensors
        others = dict.fromkeys(names) | dict(zip(names, rest, strict=False))
        try:
            _check_differentiable(operator, xs, ws, others)
            activation = activation_of(operator.name, options.get("activation"))
            kept = kept_of(operator, options["group_name"], xs[0].shape[0], options)
        except InputError as error:
            raise refused(options["group_name"], error) from None
        has_norm = others.get(NORM_WEIGHT) is not None  # beside which no activation is taken: the call says so
        if not has_norm and (activation is not None or others.get(GATE) is not None):
            return _composed(kernel, Request((xs, ws), options), others)
        call = _Call(kept, below, names, len(xs), len(ws), options)
        differentiated: Any = _Differentiated
        return list(differentiated.apply(call, *xs, *ws, *others.values()))

    return kernel


def _check_differentiable(operator: Operator, xs: list[Any], ws: list[Any], others: dict[str, Any]) -> None:
    if operator.dual is not None and xs[0].dtype != FP8:
        return
    factors = {"x": xs, "w": ws, GATE: [others.get(GATE)]}
    scales = {name: [others.get(name)] for name in (SCALE_X, SCALE_W)}
    if operator.dual is None:
        raise InputError(f"differentiate {operator.name}", "it has no gradients", "Call it under torch.no_grad()")
    for name, tensors in (factors | scales).items():
        if any(each is not None and each.requires_grad for each in tensors) and xs[0].dtype == FP8:
            cure = "Train in 16 bits, or pass fp8 operands and their scales detached"
            raise InputError(f"differentiate {operator.name} of fp8 operands", f"{name} requires_grad", cure)
    if xs[0].dtype == FP8 and others.get(GATE) is not None:
        cure = "Call it under torch.no_grad()"
        raise InputError(f"differentiate {operator.name} of fp8 operands", "a gate beside them", cure)


def _composed(op: Kernel, request: Request, others: dict[str, Any]) -> list[Any]:
    """An activation, a gate, and the residual behind them, by torch; the product by the op."""
    (xs, ws), options = request.tensors, dict(request.options)
    name = options.pop("activation", None)
    activation = ACTIVATIONS[name] if name else lambda value: value
    gate, residual = others.get(GATE), others.get(RESIDUAL)
    others = others | {name: None for name in (GATE, RESIDUAL) if name in others}
    results = list(op(xs, [*ws, gate] if gate is not None else ws, *others.values(), **options))
    gathered = [results.pop()] if options.get("return_gathered") else []
    results = [results[0] * activation(results[1])] if gate is not None else [activation(each) for each in results]
    if residual is not None:
        results[0] = results[0] + residual
    return results + gathered


class _Differentiated(torch.autograd.Function):
    """One call, and its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *flat: Any) -> tuple[Any, ...]:
        xs, ws, others = call.told_apart(flat)
        asked_xs, asked_ws, asked_others = call.told_apart(ctx.needs_input_grad[1:])
        names = ["x"] * any(asked_xs) + [f"w.{index}" for index, is_asked in enumerate(asked_ws) if is_asked]
        names += [name for name, is_asked in asked_others.items() if is_asked]
        kept = call.kept
        wants_gathered = call.options.get("return_gathered", False)
        keeps_gathered = any(asked_ws) and kept.operator.gathers and kept.save != "shard" and kept.world_size > 1
        options = call.options | {"gradients": " ".join(names)}
        if keeps_gathered:
            options["return_gathered"] = True
        results = list(call.below(xs, ws, *others.values(), **options))
        saved_xs = list(xs) if any(asked_ws) else []
        if keeps_gathered:
            rows = results[-1] if wants_gathered else results.pop()
            saved_xs = [_own_columns(kept, rows) if kept.save == "columns" else rows]
        weight = others.get(NORM_WEIGHT)
        ctx.save_for_backward(*saved_xs, *ws, *([results[1], weight] if weight is not None else []))
        ctx.call, ctx.asked = call, (asked_xs, asked_ws, asked_others)
        ctx.saved_xs, ctx.has_norm, ctx.has_gathered = len(saved_xs), weight is not None, wants_gathered
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call, (asked_xs, asked_ws, asked_others) = ctx.call, ctx.asked
        kept = call.kept
        saved = _saved(ctx)
        dys = [None if each is None else each.contiguous() for each in gradients]
        d_gathered = dys.pop() if ctx.has_gathered else None
        found: dict[str, Any] = {}
        if ctx.has_norm:
            eps = call.options.get("norm_eps", NORM_EPS)
            dys, found[NORM_WEIGHT] = _of_norm((kept, asked_others[NORM_WEIGHT]), dys, saved[-2:], eps)
        found[RESIDUAL] = dys[0]
        xs, ws = saved[: ctx.saved_xs], saved[ctx.saved_xs : ctx.saved_xs + call.ws]
        asked = Asked(asked_xs, asked_ws, asked_others.get(BIAS, False))
        factors: Gradients = gradients_of(kept, asked, dys, xs or [None] * call.xs, ws)
        dxs = factors.xs
        if d_gathered is not None and asked_xs[0]:
            dxs = [added_to_shard(kept, dxs[0], d_gathered)]
        found[BIAS] = factors.bias
        beside = [found.get(name) if asked_others[name] else None for name in call.names]
        return (None, *dxs, *factors.ws, *beside)


def _own_columns(kept: Kept, rows: torch.Tensor) -> torch.Tensor:
    """This rank's part of the columns of all rows, as rows: `[k/W, m]`, dealt as torch.chunk deals them."""
    lo, hi = shard_rows(rows.shape[1], kept.world_size, kept.rank)
    return rows[:, lo:hi].t().contiguous()


def _of_norm(
    asked: tuple[Kept, bool], dys: list[Any], saved: list[torch.Tensor], eps: float
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """The gradient of the sum behind a norm that returned (normed, z), and that of its weight, if that is asked for: of
    all rows, so where each rank norms only its own it is summed over the ranks. saved: z and the weight. Collective.
    """
    (kept, wants_weight), (z, weight), (d_normed, dz) = asked, saved, dys
    if d_normed is None:
        return [dz], None
    through, d_weight = norm_gradients(z, weight, eps, d_normed)
    if wants_weight and kept.operator.scatters:
        d_weight = summed(kept, d_weight)
    return [through if dz is None else dz + through], d_weight.to(weight.dtype)


def _saved(ctx: Any) -> list[torch.Tensor]:
    """The tensors that the forward kept. Raises InputError, on every rank, where there is nothing to differentiate."""
    kept = ctx.call.kept
    name = f"differentiate {kept.operator.name}"
    if torch.is_grad_enabled():
        cure = "Leave out create_graph=True; gradients of gradients are not computed"
        raise refused(kept.group_name, InputError(f"{name} twice", "backward is asked for a graph", cure))
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        cure = "Pass retain_graph=True to the first backward, or compute the result again"
        raise refused(kept.group_name, InputError(name, f"its graph is gone: {error}"[:200], cure)) from None
