"""Gradients of the operators, at the Autograd key of torch's dispatcher.

The product, its collective, a bias, a residual and a norm are one node of the graph. An activation and a gate, whose
gradients need what came before them, are computed by torch behind the product. Gradients are calls of operators again,
so that they may be differentiated, too: gathered rows that are kept for the gradient of a weight are a result of the
node, through which a gradient of that gradient comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from overweave.compat.torch_names import AutoDispatchBelowAutograd, OpOverload, any_requires_grad
from overweave.errors import InputError
from overweave.ir.epilogue import Applied, Epilogue, told_apart
from overweave.ir.operators.forms import (
    BIAS,
    GATE,
    NORM_EPS,
    NORM_WEIGHT,
    REGISTERED,
    RESIDUAL,
    SCALE_W,
    SCALE_X,
)
from overweave.ir.operators.record import Operator
from overweave.ir.shards import shard_rows
from overweave.ops.call.operands import FP8, activation_of, added_by
from overweave.ops.call.surroundings import is_watched
from overweave.ops.dispatch.backward import (
    Gradients,
    Kept,
    NeededGradients,
    added_to_shard,
    exchange_of,
    gradients_of,
    kept_of,
    norm_gradients,
    summed,
)
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.collectives import replicated
from overweave.ops.dispatch.route import refused
from overweave.ops.dispatch.schema import (
    DEFINED,
    OF_GRADIENTS,
    PLACE,
    Eager,
    OperatorArguments,
    SchemaCall,
    beside,
    given_by,
    in_order,
    request_of,
)
from overweave.runtime.library.epilogue import ended, in_torch, slice_columns

DispatchKernel = Callable[..., Any]
ForwardRun = Callable[
    [OperatorArguments, str], list[torch.Tensor]
]  # of a call, undifferentiated, and the names of what has a gradient
_below_autograd = AutoDispatchBelowAutograd


class _Call(NamedTuple):
    """A differentiated call. names: of the tensors beside its xs and its ws. eps: of a norm."""

    kept: Kept
    names: tuple[str, ...]
    xs: int
    ws: int
    wants_gathered: bool
    eps: float

    def told_apart(self, flat: tuple[Any, ...]) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """xs, ws, and the rest by name."""
        factors = self.xs + self.ws
        return list(flat[: self.xs]), list(flat[self.xs : factors]), dict(zip(self.names, flat[factors:], strict=True))


def autograd_kernel(operator: Operator, op: OpOverload, plain: DispatchKernel) -> DispatchKernel:
    """The kernel of an operator's op for tensors that may be differentiated. plain: that of all others."""
    names = beside(operator)

    def below(*tensors: Any, **options: Any) -> Any:
        with _below_autograd():
            return op(*tensors, **options) if is_watched() else plain(*tensors, **options)

    def run(group_name: str, given: OperatorArguments, gradients: str) -> Any:
        request = request_of(names, group_name, given)
        return below(*request.tensors, **(request.options | {"gradients": gradients}))

    def kernel(*tensors: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and any_requires_grad(*tensors)):
            return below(*tensors, **options)
        kept = {name: each for name, each in options.items() if name in (*OF_GRADIENTS, PLACE)}
        given = given_by(names, SchemaCall(tensors, options)) | kept
        return _recorded(operator, options["group_name"], given, partial(run, options["group_name"]))

    return kernel


def eager_call(operator: Operator) -> Eager:
    """A call of an operator, recorded if its tensors are differentiated, where nothing stands between its op and the
    op's kernels."""

    def run(group_name: str, given: OperatorArguments, gradients: str) -> list[torch.Tensor]:
        plain = {name: each for name, each in given.items() if name not in OF_GRADIENTS}
        return in_order(plain, call(operator, group_name, plain, gradients))

    return lambda group_name, given: _recorded(operator, group_name, given, partial(run, group_name))


def _recorded(operator: Operator, group_name: str, given: OperatorArguments, run: ForwardRun) -> list[torch.Tensor]:
    """The results of a call, which torch records if a tensor of it is differentiated."""
    xs, ws = _listed(given["x"]), _listed(given["w"])
    others = {name: each for name in DEFINED[operator.name].names if (each := given.get(name)) is not None}
    if not (torch.is_grad_enabled() and any_requires_grad(*xs, *ws, *others.values())):
        return run(given, "")
    try:
        _check_differentiable(operator, xs, ws, others)
        activation = activation_of(operator.name, given.get("activation"))
        kept = kept_of(operator, group_name, xs[0].shape[0], given)
        added = added_by(operator, given) if REGISTERED else ()
    except InputError as error:
        raise refused(group_name, error) from None
    has_norm = NORM_WEIGHT in others  # beside which no activation is taken: the call says so
    if not has_norm and (activation is not None or GATE in others or added):
        return _composed(given, ws, (others, added), lambda product: _recorded(operator, group_name, product, run))
    asks_gathered, eps = bool(given.get("return_gathered")), given.get("norm_eps", NORM_EPS)
    of_call = _Call(kept, tuple(others), len(xs), len(ws), asks_gathered, eps)
    differentiated: Any = _Differentiated
    results = list(differentiated.apply((of_call, given, run), *xs, *ws, *others.values()))
    return results[: len(ws) + asks_gathered] if operator.gathers else results


def _listed(factor: Any) -> Any:
    return factor if factor.__class__ in (list, tuple) else (factor,)


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


def _composed(
    given: OperatorArguments,
    ws: Sequence[Any],
    ends: tuple[dict[str, Any], tuple[Applied, ...]],
    product: Callable[[OperatorArguments], Any],
) -> list[Any]:
    """An activation, a gate, and what stands behind them, by torch. ends: the tensors beside the factors, and the
    epilogues that were registered. product: computes and records what is before."""
    others, added = ends
    more, rows = told_apart(added)
    words = set(others)
    if not any(each.of_parts for each in added):  # behind which a bias is added
        words.discard(BIAS)
    epilogue = Epilogue.of(words, activation=given.get("activation"), more=more)
    behind = {"activation", *epilogue.inputs, *(word for each in added for word in each.form.words)}
    before = {key: each for key, each in given.items() if key not in behind}
    is_gated = epilogue.products > 1
    results = product(before | {"w": [*ws, others[GATE]]} if is_gated else before)
    gathered = [results.pop()] if given.get("return_gathered") else []
    gate, first, beside = results.pop() if is_gated else None, 0, {name: given[name] for name in epilogue.inputs}
    for index, each in enumerate(results):
        of_columns = slice_columns(beside, (first, first + each.shape[1]), sum(w.shape[1] for w in ws))
        results[index] = ended(each, slice(None), epilogue, of_columns, gate)
        first += each.shape[1]
    return (list(in_torch(results[0], slice(None), rows, given)) if rows else results) + gathered


@lru_cache(maxsize=1024)
def _named(asked: tuple[bool, ...], xs: int, ws: int, names: tuple[str, ...]) -> str:
    """The tensors that a call is differentiated by, in words that all ranks compare."""
    of_ws = [f"w.{index}" for index, is_asked in enumerate(asked[xs : xs + ws]) if is_asked]
    of_names = [name for name, is_asked in zip(names, asked[xs + ws :], strict=True) if is_asked]
    return " ".join(["x"] * any(asked[:xs]) + of_ws + of_names)


class _Differentiated(torch.autograd.Function):
    """One call, and its gradients."""

    @staticmethod
    def forward(ctx: Any, undifferentiated: tuple[_Call, OperatorArguments, ForwardRun], *flat: Any) -> tuple[Any, ...]:
        call, given, run = undifferentiated  # the graph keeps no more of it than the call: the rest holds tensors
        needed = ctx.needs_input_grad[1:]
        asked_xs, asked_ws, asked_others = call.told_apart(needed)
        kept, wants_weights = call.kept, any(asked_ws)
        keeps_gathered = wants_weights and kept.operator.gathers and kept.save != "shard" and kept.world_size > 1
        if keeps_gathered:
            given = given | {"return_gathered": True}
        results = run(given, _named(needed, call.xs, call.ws, call.names))
        saved_xs = list(flat[: call.xs]) if wants_weights else []
        if keeps_gathered:
            saved_xs = [results[-1]]  # `_recorded` drops it, unless it was asked for
            if kept.save == "columns":
                saved_xs = [_own_columns(kept, results[-1] if call.wants_gathered else results.pop())]
        has_norm = NORM_WEIGHT in call.names
        of_norm = [results[1], flat[call.xs + call.ws + call.names.index(NORM_WEIGHT)]] if has_norm else []
        ctx.save_for_backward(*saved_xs, *flat[call.xs : call.xs + call.ws], *of_norm)
        ctx.call, ctx.asked = call, (asked_xs, asked_ws, asked_others)
        ctx.saved_xs, ctx.has_norm = len(saved_xs), has_norm
        ctx.keeps_rows = keeps_gathered and kept.save != "columns" and not call.wants_gathered
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call, (asked_xs, asked_ws, asked_others) = ctx.call, ctx.asked
        kept = call.kept
        saved = _saved(ctx)
        dys = [None if each is None else each.contiguous() for each in gradients]
        d_gathered = dys.pop() if call.wants_gathered or ctx.keeps_rows else None
        found: dict[str, Any] = {}
        if ctx.has_norm:
            dys, found[NORM_WEIGHT] = _of_norm((kept, asked_others[NORM_WEIGHT]), dys, saved[-2:], call.eps)
        found[RESIDUAL] = dys[0]
        xs, ws = saved[: ctx.saved_xs], saved[ctx.saved_xs : ctx.saved_xs + call.ws]
        asked = NeededGradients(asked_xs, asked_ws, asked_others.get(BIAS, False))
        factors: Gradients = gradients_of(kept, asked, dys, xs or [None] * call.xs, ws)
        dxs = factors.xs
        if d_gathered is not None and asked_xs[0]:
            dxs = [added_to_shard(kept, dxs[0], d_gathered, is_alike=call.wants_gathered)]
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
    if kept.operator.scatters:
        weight = replicated(exchange_of(kept), weight)
    through, d_weight = norm_gradients(z, weight, eps, d_normed)
    if wants_weight and kept.operator.scatters:
        d_weight = summed(kept, d_weight)
    return [through if dz is None else dz + through], d_weight.to(weight.dtype)


def _without_history(ctx: Any) -> str:
    """Why a gradient of a gradient would not reach x: what was kept of it has no history. Empty if it does."""
    kept = ctx.call.kept
    if not ctx.saved_xs or kept.world_size == 1:
        return ""
    if kept.save == "columns":
        return "save='columns' keeps what was gathered without its history"
    is_returned = kept.operator.gathers and kept.save == "gathered" and ctx.call.wants_gathered
    return "return_gathered=True beside save='gathered'" if is_returned else ""


def _saved(ctx: Any) -> list[torch.Tensor]:
    """The tensors that the forward kept. Raises InputError, on every rank, where there is nothing to differentiate."""
    kept = ctx.call.kept
    name = f"differentiate {kept.operator.name}"
    if torch.is_grad_enabled() and (found := _without_history(ctx)):
        raise refused(
            kept.group_name, InputError(f"{name} twice", found, "Leave out create_graph=True, or this option")
        )
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        found, cure = f"its graph is gone: {error}", "Pass retain_graph=True to the first backward, or compute it again"
        if "a second time" not in str(error):  # of a checkpoint, or another hook of saved tensors
            found, cure = f"what its forward kept is not there: {error}", "Mend what computes it again, or holds it"
        raise refused(kept.group_name, InputError(name, found[:200], cure)) from error
