"""Autograd of the operators, at the Autograd key of torch's dispatcher.

The product, its collective, a bias, a residual and a norm are one node of the graph. An activation and a gate, whose
gradients need the product, are computed by torch after it. Backward calls operators again, so that it can be
differentiated, too: gathered rows that are saved for dw are an output of the node, which takes the gradient of that dw.
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
    CallInfo,
    Gradients,
    NeededGradients,
    add_own_rows,
    all_reduce_sum,
    call_info,
    gradient_exchange,
    gradients_of,
    norm_gradients,
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
    arguments_from,
    in_order,
    tensor_names,
    to_schema_call,
)
from overweave.runtime.library.epilogue import ended, in_torch, slice_columns

DispatchKernel = Callable[..., Any]
ForwardRun = Callable[
    [OperatorArguments, str], list[torch.Tensor]
]  # of a call, undifferentiated, and the names of what has a gradient
_below_autograd = AutoDispatchBelowAutograd


class _Call(NamedTuple):
    """A differentiated call. names: of the tensors other than xs and ws. xs, ws: how many. eps: of a norm."""

    info: CallInfo
    names: tuple[str, ...]
    xs: int
    ws: int
    wants_gathered: bool
    eps: float

    def split(self, flat: tuple[Any, ...]) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Split a flat list into (xs, ws, the other tensors by name)."""
        tensors = self.xs + self.ws
        return list(flat[: self.xs]), list(flat[self.xs : tensors]), dict(zip(self.names, flat[tensors:], strict=True))


def autograd_kernel(operator: Operator, op: OpOverload, forward_kernel: DispatchKernel) -> DispatchKernel:
    """Return the Autograd kernel of an operator's op. forward_kernel: the kernel below autograd."""
    names = tensor_names(operator)

    def below(*tensors: Any, **options: Any) -> Any:
        with _below_autograd():
            return op(*tensors, **options) if is_watched() else forward_kernel(*tensors, **options)

    def run(group_name: str, arguments: OperatorArguments, gradients: str) -> Any:
        request = to_schema_call(names, group_name, arguments)
        return below(*request.tensors, **(request.options | {"gradients": gradients}))

    def kernel(*tensors: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and any_requires_grad(*tensors)):
            return below(*tensors, **options)
        gradient_options = {name: each for name, each in options.items() if name in (*OF_GRADIENTS, PLACE)}
        arguments = arguments_from(names, SchemaCall(tensors, options)) | gradient_options
        return _record_call(operator, options["group_name"], arguments, partial(run, options["group_name"]))

    return kernel


def eager_call(operator: Operator) -> Eager:
    """Return a function that calls an operator past torch's dispatcher, and records it for autograd if needed.

    For calls that no tracer, mode or autocast watches.
    """

    def run(group_name: str, arguments: OperatorArguments, gradients: str) -> list[torch.Tensor]:
        forward_arguments = {name: each for name, each in arguments.items() if name not in OF_GRADIENTS}
        return in_order(forward_arguments, call(operator, group_name, forward_arguments, gradients))

    return lambda group_name, arguments: _record_call(operator, group_name, arguments, partial(run, group_name))


def _record_call(
    operator: Operator, group_name: str, arguments: OperatorArguments, run: ForwardRun
) -> list[torch.Tensor]:
    """Run a call; add its node to the autograd graph if a tensor of it requires grad. Returns its results.

    run: runs it without autograd. Raises InputError, on every rank, for what cannot be differentiated.
    """
    xs, ws = _listed(arguments["x"]), _listed(arguments["w"])
    named_tensors = {name: each for name in DEFINED[operator.name].names if (each := arguments.get(name)) is not None}
    if not (torch.is_grad_enabled() and any_requires_grad(*xs, *ws, *named_tensors.values())):
        return run(arguments, "")
    try:
        _check_differentiable(operator, xs, ws, named_tensors)
        activation = activation_of(operator.name, arguments.get("activation"))
        info = call_info(operator, group_name, xs[0].shape[0], arguments)
        registered = added_by(operator, arguments) if REGISTERED else ()
    except InputError as error:
        raise refused(group_name, error) from None
    has_norm = NORM_WEIGHT in named_tensors  # a call with a norm and an activation is refused before
    if not has_norm and (activation is not None or GATE in named_tensors or registered):
        return _record_composed(
            arguments, ws, (named_tensors, registered), lambda product: _record_call(operator, group_name, product, run)
        )
    wants_gathered, eps = bool(arguments.get("return_gathered")), arguments.get("norm_eps", NORM_EPS)
    of_call = _Call(info, tuple(named_tensors), len(xs), len(ws), wants_gathered, eps)
    differentiated: Any = _Differentiated
    results = list(differentiated.apply((of_call, arguments, run), *xs, *ws, *named_tensors.values()))
    return results[: len(ws) + wants_gathered] if operator.gathers else results


def _listed(factor: Any) -> Any:
    return factor if factor.__class__ in (list, tuple) else (factor,)


def _check_differentiable(operator: Operator, xs: list[Any], ws: list[Any], named_tensors: dict[str, Any]) -> None:
    """Raise InputError for an operator without gradients, and for fp8 operands or their scales that require grad."""
    if operator.dual is not None and xs[0].dtype != FP8:
        return
    factors = {"x": xs, "w": ws, GATE: [named_tensors.get(GATE)]}
    scales = {name: [named_tensors.get(name)] for name in (SCALE_X, SCALE_W)}
    if operator.dual is None:
        raise InputError(f"differentiate {operator.name}", "it has no gradients", "Call it under torch.no_grad()")
    for name, tensors in (factors | scales).items():
        if any(each is not None and each.requires_grad for each in tensors) and xs[0].dtype == FP8:
            cure = "Train in 16 bits, or pass fp8 operands and their scales detached"
            raise InputError(f"differentiate {operator.name} of fp8 operands", f"{name} requires_grad", cure)
    if xs[0].dtype == FP8 and named_tensors.get(GATE) is not None:
        cure = "Call it under torch.no_grad()"
        raise InputError(f"differentiate {operator.name} of fp8 operands", "a gate beside them", cure)


def _record_composed(
    arguments: OperatorArguments,
    ws: Sequence[Any],
    epilogue_inputs: tuple[dict[str, Any], tuple[Applied, ...]],
    product: Callable[[OperatorArguments], Any],
) -> list[Any]:
    """Record the product as one node, and the activation, gate and later steps as ordinary torch ops after it.

    epilogue_inputs: the tensors other than x and w by name, and the registered epilogues. product: computes and records
    a call with the arguments that come before them. Returns the results of the call.
    """
    named_tensors, registered = epilogue_inputs
    element_forms, row_forms = told_apart(registered)
    names = set(named_tensors)
    if not any(each.of_parts for each in registered):  # a bias is added after these
        names.discard(BIAS)
    epilogue = Epilogue.of(names, activation=arguments.get("activation"), more=element_forms)
    after_product = {"activation", *epilogue.inputs, *(word for each in registered for word in each.form.words)}
    product_arguments = {key: each for key, each in arguments.items() if key not in after_product}
    is_gated = epilogue.products > 1
    results = product(product_arguments | {"w": [*ws, named_tensors[GATE]]} if is_gated else product_arguments)
    gathered = [results.pop()] if arguments.get("return_gathered") else []
    gate, first_col, inputs = (
        results.pop() if is_gated else None,
        0,
        {name: arguments[name] for name in epilogue.inputs},
    )
    for index, each in enumerate(results):
        column_inputs = slice_columns(inputs, (first_col, first_col + each.shape[1]), sum(w.shape[1] for w in ws))
        results[index] = ended(each, slice(None), epilogue, column_inputs, gate)
        first_col += each.shape[1]
    return (list(in_torch(results[0], slice(None), row_forms, arguments)) if row_forms else results) + gathered


@lru_cache(maxsize=1024)
def _gradient_names(needed: tuple[bool, ...], xs: int, ws: int, names: tuple[str, ...]) -> str:
    """Return which tensors need gradients, as a string that all ranks compare. needed: of xs, ws, others."""
    w_names = [f"w.{index}" for index, is_needed in enumerate(needed[xs : xs + ws]) if is_needed]
    other_names = [name for name, is_needed in zip(names, needed[xs + ws :], strict=True) if is_needed]
    return " ".join(["x"] * any(needed[:xs]) + w_names + other_names)


class _Differentiated(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, undifferentiated: tuple[_Call, OperatorArguments, ForwardRun], *flat: Any) -> tuple[Any, ...]:
        """Run the call, and save what the gradients that are needed read: x (or gathered rows), w, and z of a norm."""
        call, arguments, run = undifferentiated  # of these ctx keeps only the _Call: the others hold tensors
        needed = ctx.needs_input_grad[1:]
        needed_xs, needed_ws, needed_others = call.split(needed)
        info, wants_weights = call.info, any(needed_ws)
        keeps_gathered = wants_weights and info.operator.gathers and info.save != "shard" and info.world_size > 1
        if keeps_gathered:
            arguments = arguments | {"return_gathered": True}
        results = run(arguments, _gradient_names(needed, call.xs, call.ws, call.names))
        saved_xs = list(flat[: call.xs]) if wants_weights else []
        if keeps_gathered:
            saved_xs = [results[-1]]  # `_record_call` drops it, unless the caller asked for it
            if info.save == "columns":
                saved_xs = [_own_columns(info, results[-1] if call.wants_gathered else results.pop())]
        has_norm = NORM_WEIGHT in call.names
        of_norm = [results[1], flat[call.xs + call.ws + call.names.index(NORM_WEIGHT)]] if has_norm else []
        ctx.save_for_backward(*saved_xs, *flat[call.xs : call.xs + call.ws], *of_norm)
        ctx.call, ctx.needed = call, (needed_xs, needed_ws, needed_others)
        ctx.saved_xs, ctx.has_norm = len(saved_xs), has_norm
        ctx.keeps_rows = keeps_gathered and info.save != "columns" and not call.wants_gathered
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of xs, ws and the other tensors, None where not needed. Collective."""
        call, (needed_xs, needed_ws, needed_others) = ctx.call, ctx.needed
        info = call.info
        saved = _saved_tensors(ctx)
        dys = [None if each is None else each.contiguous() for each in gradients]
        d_gathered = dys.pop() if call.wants_gathered or ctx.keeps_rows else None
        grads_by_name: dict[str, Any] = {}
        if ctx.has_norm:
            dys, grads_by_name[NORM_WEIGHT] = _norm_gradients(
                (info, needed_others[NORM_WEIGHT]), dys, saved[-2:], call.eps
            )
        grads_by_name[RESIDUAL] = dys[0]
        xs, ws = saved[: ctx.saved_xs], saved[ctx.saved_xs : ctx.saved_xs + call.ws]
        needed = NeededGradients(needed_xs, needed_ws, needed_others.get(BIAS, False))
        factors: Gradients = gradients_of(info, needed, dys, xs or [None] * call.xs, ws)
        dxs = factors.xs
        if d_gathered is not None and needed_xs[0]:
            dxs = [add_own_rows(info, dxs[0], d_gathered, is_replicated=call.wants_gathered)]
        grads_by_name[BIAS] = factors.bias
        grads_of_others = [grads_by_name.get(name) if needed_others[name] else None for name in call.names]
        return (None, *dxs, *factors.ws, *grads_of_others)


def _own_columns(info: CallInfo, rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's columns of all rows, transposed, `[k/W, m]`, divided as torch.chunk does."""
    lo, hi = shard_rows(rows.shape[1], info.world_size, info.rank)
    return rows[:, lo:hi].t().contiguous()


def _norm_gradients(
    call_and_need: tuple[CallInfo, bool], dys: list[Any], saved: list[torch.Tensor], eps: float
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Return the gradients of (the sum before a norm that returned (normed, z), the norm's weight or None).

    call_and_need: the call, and whether the weight's gradient is needed. It is of all rows: where each rank norms its
    own rows, it is all-reduced. saved: z and the weight. Collective.
    """
    (info, wants_weight), (z, weight), (d_normed, dz) = call_and_need, saved, dys
    if d_normed is None:
        return [dz], None
    if info.operator.scatters:
        weight = replicated(gradient_exchange(info), weight)
    dsum, d_weight = norm_gradients(z, weight, eps, d_normed)
    if wants_weight and info.operator.scatters:
        d_weight = all_reduce_sum(info, d_weight)
    return [dsum if dz is None else dz + dsum], d_weight.to(weight.dtype)


def _double_backward_obstacle(ctx: Any) -> str:
    """Return why double backward would not reach x (what was saved of it has no autograd history); or ""."""
    info = ctx.call.info
    if not ctx.saved_xs or info.world_size == 1:
        return ""
    if info.save == "columns":
        return "save='columns' keeps what was gathered without its history"
    is_returned = info.operator.gathers and info.save == "gathered" and ctx.call.wants_gathered
    return "return_gathered=True beside save='gathered'" if is_returned else ""


def _saved_tensors(ctx: Any) -> list[torch.Tensor]:
    """Return the saved tensors. Raises InputError, on every rank, for a double backward that would lack a part, and
    for a freed graph.
    """
    info = ctx.call.info
    name = f"differentiate {info.operator.name}"
    if torch.is_grad_enabled() and (found := _double_backward_obstacle(ctx)):
        raise refused(
            info.group_name, InputError(f"{name} twice", found, "Leave out create_graph=True, or this option")
        )
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        found, cure = f"its graph is gone: {error}", "Pass retain_graph=True to the first backward, or compute it again"
        if "a second time" not in str(error):  # of a checkpoint, or another hook of saved tensors
            found, cure = f"what its forward kept is not there: {error}", "Mend what computes it again, or holds it"
        raise refused(info.group_name, InputError(name, found[:200], cure)) from error
