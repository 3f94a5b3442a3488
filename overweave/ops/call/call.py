"""One call of an operator, from what a caller passes to the tensors that hold its results, as its record says."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import GATE
from overweave.ir.operators.record import Operator
from overweave.ir.plan import numbered
from overweave.ir.problem import LONGEST_LIST, Problem
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.ops.call.arguments import check_operands
from overweave.ops.call.devices import is_away, run_on
from overweave.ops.call.dispatch import GroupLike, Options, Weights, group_of, look_up, prepare, refuse
from overweave.ops.call.eager import eagerly, is_read_by_compiler
from overweave.ops.call.epilogue import Extras, checked_epilogue
from overweave.ops.call.norm import RmsNorm, checked_norm
from overweave.ops.call.prepared import Tensors
from overweave.ops.call.scales import FP8, TAKEN, dtype_of, name_of
from overweave.ops.call.surroundings import PRE_DISPATCH, check_surroundings
from overweave.schedules.catalog.forms import check_forms, no_gate

# What torch knows of tracers and autocast, without its functions of Python: every call asks.
_is_recorded, _is_dispatched = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_is_before_dispatch, _is_cast = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._is_any_autocast_enabled
WEIGHTS = tuple(numbered("w", index) for index in range(LONGEST_LIST))
PRODUCTS = tuple(numbered("y", index) for index in range(LONGEST_LIST))
Beside = tuple[Extras | None, RmsNorm | None]  # what happens to the product, and to the rows of a sum
NOTHING: Beside = (None, None)


def call(
    operator: Operator,
    x: torch.Tensor,
    w: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: GroupLike,
    options: Options,
    beside: Beside = NOTHING,
) -> Tensors:
    """Computes an operator: all tensors of the call by name, `y` among them. options: `m`, `return_gathered`, `plan`.

    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled.
    """
    if is_read_by_compiler():
        return eagerly(call, operator, x, w, group, options, beside)
    if _is_recorded() or _is_dispatched() or _is_before_dispatch(PRE_DISPATCH) or _is_cast():
        check_surroundings(operator.name, x)
    if is_away(x):
        return run_on(x.device, call, operator, x, w, group, options, beside)
    resolved = group_of(group)
    extras, norm = beside
    are_several = operator.forms.several_weights and isinstance(w, (list, tuple))
    weights: Weights = tuple(w) if are_several else (w,)  # type: ignore[assignment]
    with resolved.turn:
        told = beside if extras is not None or norm is not None else ()
        key, prepared = look_up(resolved, operator.name, (x, *weights), options, told)
        problem = prepared.problem if prepared else _checked(operator, x, weights, resolved, (options, beside))
        tensors = {"x": x, "w": weights[0]}
        if len(weights) > 1:
            tensors |= zip(WEIGHTS, weights, strict=False)
        if extras is not None:
            tensors |= extras.tensors
        if norm is not None:
            tensors |= norm.tensors
        (prepared or prepare(key, problem, resolved, tensors, options["plan"]))(tensors)
    return tensors


_Wanted = tuple[Options, Beside]


def _checked(operator: Operator, x: torch.Tensor, weights: Weights, group: Group, wanted: _Wanted) -> Problem:
    try:
        return _problem(operator, x, weights, group, wanted)
    except InputError as error:
        raise refuse(group, error) from None


def _problem(operator: Operator, x: torch.Tensor, weights: Weights, group: Group, wanted: _Wanted) -> Problem:
    options, (extras, norm) = wanted
    is_transposed = check_operands(operator.name, x, *weights, dtypes=TAKEN)
    columns = tuple(w.shape[1] for w in weights)
    problem = Problem(
        operator=operator.name,
        m=_rows(operator, x, group, options["m"]) if operator.has_row_shards else x.shape[0],
        n=sum(columns),
        k=x.shape[1],
        world_size=group.world_size,
        dtype=name_of(x.dtype),
        b_is_transposed=is_transposed,
        returns_gathered=options["return_gathered"],
        columns=columns if len(columns) > 1 else (),
    )
    if getattr(extras, GATE, None) is not None and (found := no_gate(operator)):
        raise InputError(f"{operator.name}: extras", *found)
    epilogue = checked_epilogue(operator.name, extras, problem.result_rows(group.rank), (x, *weights))
    out_dtype = name_of(extras.scales.result_dtype(x)) if extras and x.dtype == FP8 else None
    problem = replace(problem, epilogue=epilogue, out_dtype=out_dtype)
    summed = x.new_empty(0, dtype=dtype_of(problem.result_dtype))
    problem = replace(problem, norm=checked_norm(operator.name, norm, (problem.m, problem.n), summed))
    check_forms(operator.name, problem)
    return problem


def _rows(operator: Operator, x: torch.Tensor, group: Group, m: int | None) -> int:
    """All rows, of which a rank passes its shard."""
    rows = x.shape[0] * group.world_size if m is None else m
    if rows < 0:
        raise InputError(f"{operator.name}: m, the rows after the gather", f"got {m}", "Pass an int >= 0, or None")
    lo, hi = shard_rows(rows, group.world_size, group.rank)
    if x.shape[0] != hi - lo:
        found = f"rank {group.rank} of {group.world_size} holds {x.shape[0]} rows, not {hi - lo}"
        raise InputError(f"{operator.name}: shards of m={rows} rows", found, "Deal rows as torch.chunk does, or pass m")
    return rows
