"""One call of an operator, from the caller's arguments to the tensors of its results, as the operator's record says.

Arguments are normalised to those of all operators; a call prepared for the same signature is looked up, or prepared if
the signature is new to the group; and it is run. The first call of a signature waits for all ranks, and raises on every
rank if they differ; later calls only post what they are about to do (memory/board/board.py).
"""

from __future__ import annotations

import torch

from overweave.compat.torch_names import (
    any_requires_grad,
    current_level,
    dispatch_tls_is_dispatch_key_included,
    get_tracing_state,
    is_any_autocast_enabled,
    len_torch_dispatch_stack,
)
from overweave.errors import InputError
from overweave.ir.counts import COUNTS
from overweave.ir.operators.forms import NORM
from overweave.ir.operators.record import Operator
from overweave.memory.group import Group
from overweave.ops.call.counts import TOKENS, RowCounts, routed
from overweave.ops.call.devices import ALIGNED_BYTES, is_away, run_on
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.ops.call.norm import with_norm
from overweave.ops.call.operands import CallArguments, check_kinds, problem_of_call, with_weights
from overweave.ops.call.prepare import prepare
from overweave.ops.call.prepared import CALLS, AgreedCall, CallKey, Tensors
from overweave.ops.call.row_map import refuse_maps
from overweave.ops.call.side_by_side import side_by_side
from overweave.ops.call.surroundings import PRE_DISPATCH, is_read_by_compiler, waited
from overweave.ops.dispatch.route import by_dispatcher
from overweave.process_settings import HELD, current

# C functions for the state of tracers and autocast: every call checks it.
_is_recorded, _is_dispatched = get_tracing_state, len_torch_dispatch_stack
_is_before_dispatch, _is_cast = dispatch_tls_is_dispatch_key_included, is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor  # looked up once
_LISTS = (list, tuple)
_PLAIN, _VALUES = frozenset((torch.Tensor, torch.nn.Parameter)), frozenset((bool, int, str))


def call(operator: Operator, group: GroupLike, arguments: CallArguments, gradients: str | None = None) -> Tensors:
    """Call an operator; return all tensors of the call by name, `y` among them.

    arguments: the caller's, by name: `x`, `w`, and keywords that the operator's record allows. gradients: None for a
    caller, whose call goes through torch's dispatcher if something is to be traced, cast or differentiated; for the op
    in the dispatcher itself, the names of the tensors that need gradients.
    Raises InputError or GroupError for invalid arguments, RankMismatch on every rank if ranks differ, PeerError for a
    peer that died or stalled.
    """
    if gradients is None:
        if arguments.get(NORM) is not None:
            arguments = with_norm(arguments)
        is_watched = is_read_by_compiler() or _is_recorded() or _is_dispatched() or _is_before_dispatch(PRE_DISPATCH)
        if is_watched or _is_cast() or (_is_grad_enabled() and any_requires_grad(*arguments.values())):
            return by_dispatcher(operator, group, arguments)
    x, w = arguments["x"], arguments["w"]
    first = x[0] if x.__class__ in _LISTS and x else x
    if is_away(first):
        return run_on(first.device, call, operator, group, arguments, gradients)
    resolved, counts = group_of(group), arguments.get(COUNTS)
    with resolved.lock:
        try:
            if gradients is not None:
                refuse_maps(operator.name, arguments.get("plan"))
            if counts is not None or arguments.get(TOKENS) is not None or x.__class__ in _LISTS:
                arguments = _normalize(operator, resolved, arguments)
                if "x" not in arguments:
                    return arguments  # the results: nothing is left to run
                counts = arguments.get(COUNTS)
            elif w.__class__ in _LISTS and operator.forms.several_weights:
                arguments = with_weights(arguments)
            key, tensors, prepared = look_up(operator, resolved, arguments)
            if prepared is None:
                problem = problem_of_call(operator, resolved, arguments, tensors)
        except InputError as error:
            raise refuse(resolved, error) from None
        words = b"" if counts is None else counts.words
        if prepared is not None:
            prepared(tensors, words)
        else:
            caller = resolved, gradients or ""
            prepare(key, problem, caller, tensors, arguments.get("plan"), words)(tensors)
    if counts is not None:
        tensors["y"] = tensors["y"][: counts.received]
    return tensors


def _normalize(operator: Operator, group: Group, arguments: CallArguments) -> CallArguments:
    """Normalise what only some operators take: tokens and counts of all-to-alls, lists of x.

    Returns the results instead, without an `x`, of a call that needs no other rank. Raises InputError.
    """
    if operator.exchanges:
        arguments = routed(operator, group, arguments)
    if isinstance(arguments["x"], _LISTS):
        refuse_maps(operator.name, arguments.get("plan"))
        return side_by_side(operator, arguments, group.world_size)
    return arguments


def look_up(operator: Operator, group: Group, arguments: CallArguments) -> tuple[CallKey, Tensors, AgreedCall | None]:
    """Return (key: all that decides how a call runs; its tensors by the names of plans; the prepared call, or None).

    Equal keys need no checks and no choice again. Key () if an argument is not hashable or has no memory: the checks
    that follow raise. Raises InputError for tensors that a key cannot distinguish.
    """
    needs_gradient, calls = torch.is_grad_enabled(), CALLS.get(group.process_group)
    settings = HELD[0] if HELD else current()  # every call comes here: a function costs time
    key_parts: list[object] = [operator.name, len(arguments), *settings]
    is_counted = arguments.get(COUNTS) is not None and operator.exchanges
    tensors: Tensors = {}
    try:
        for name, value in arguments.items():
            if value is None:
                continue
            type_ = value.__class__
            if type_ is RowCounts:  # a plan serves all counts up to the capacity
                key_parts += (name, value.most)
                tensors[name] = value.matrix
                continue
            if type_ in _VALUES or (type_ not in _PLAIN and not isinstance(value, _Tensor)):
                key_parts += (name, type_, value)  # the type too: 1, 1.0 and True are equal
                continue
            if type_ not in _PLAIN:  # subclasses may warn, or raise, when asked for their address
                value = arguments[name] = waited(value)
                check_kinds(operator, arguments)
            misaligned, gradient = value.data_ptr() % ALIGNED_BYTES, needs_gradient and value.requires_grad
            shape = value.shape[1:] if is_counted and name == "x" else value.shape
            key_parts += (name, type_, shape, value.stride(), value.dtype, value.device, misaligned, gradient)
            tensors[name] = value
        key = tuple(key_parts)
        prepared = None if calls is None else calls.get(key)
    except (TypeError, RuntimeError):  # not hashable, or without memory: the checks that follow raise
        return (), tensors, None
    if prepared is not None and current_level() >= 0:  # forward-mode tangents are not part of a key
        check_kinds(operator, arguments)
    return key, tensors, prepared
