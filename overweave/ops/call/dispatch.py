"""From an operator's tensors to a Plan that runs: agree with the peers, choose, prove, bind once, then call.

The first call of a signature waits for all ranks and raises on every rank if they differ; later calls only post what
they are about to do (memory/board/board.py).
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import TypedDict, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.autograd import forward_ad

from overweave.errors import GroupError, InputError, OverweaveError, ScheduleError
from overweave.ir.epilogue import Z
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.board.board import Board
from overweave.memory.fast_empty import maker
from overweave.memory.group import LIVING, Group, process_group_of, resolve
from overweave.memory.group import GroupLike as GroupLike
from overweave.memory.outside_inference_mode import lasting
from overweave.ops.call.arguments import check_kinds, check_plain
from overweave.ops.call.plan_words import candidate_of
from overweave.ops.call.prepared import Bound, Calls, Key, Prepared, Run, Tensors, as_matrices, outputs_of
from overweave.ops.call.torch_symm_mem import bind_by_torch
from overweave.runtime.backends import load
from overweave.runtime.host.host import run_on_host
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.outside import OUTSIDE
from overweave.tuner.model.choice import Choice, chosen
from overweave.tuner.model.choose import choose
from overweave.tuner.space.space import Candidate, obstacle
from overweave.tuner.space.target import Target, target_of
from overweave.tuner.store.agreement import agreed_knowledge

Weights = tuple[torch.Tensor, ...]


class Options(TypedDict):
    """What a caller may pass beside tensors."""

    m: int | None
    return_gathered: bool
    plan: str | None


Refusal = TypeVar("Refusal", bound=Exception)
ALIGNED_BYTES = 16


_Tensor = torch.Tensor  # looked up once
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_PREPARED: dict[dist.ProcessGroup, Calls] = {}
atexit.register(_PREPARED.clear)  # a process group must not outlive the interpreter
_GROUPS: dict[dist.ProcessGroup, Group] = {}
atexit.register(lambda: _GROUPS.clear())  # a process group must not outlive the interpreter
_MEETING = threading.Lock()  # threads may be new to groups at once
_INHERITED: list[object] = []  # groups of a process that this one was forked from, and what was kept for them


def group_of(group: GroupLike) -> Group:
    """What the caller means by `group`, remembered. Raises GroupError."""
    key = dist.group.WORLD if group is None else group
    if not isinstance(key, dist.ProcessGroup):
        key = process_group_of(group)
    known = _GROUPS.get(key)
    if known is None or key not in LIVING:
        known = _met(key)
    return known


def _met(process_group: dist.ProcessGroup) -> Group:
    """A group that is new to us. What was kept for groups that have been destroyed since goes."""
    if process_group in _INHERITED:
        found, cure = "this process was forked from the rank that made it", "Start ranks before they make groups"
        raise GroupError("compute in the group that was passed", found, cure)
    with _MEETING:
        for known in [known for known in _GROUPS if known not in LIVING]:
            del _GROUPS[known]
            if known in _PREPARED and _PREPARED[known].close():
                del _PREPARED[known]
        if process_group not in _GROUPS:
            _GROUPS[process_group] = resolve(process_group)
        return _GROUPS[process_group]


def _leave_to_parent() -> None:
    """In a forked process: a call there would speak in its parent's name. Kept, as threads of theirs end with them."""
    global _GROUPS, _MEETING
    _INHERITED.extend([*LIVING, *_GROUPS, _GROUPS])
    _GROUPS, _MEETING = {}, threading.Lock()  # another thread may have held that, and is not here


os.register_at_fork(after_in_child=_leave_to_parent)


def look_up(
    group: Group, operator: str, operands: tuple[torch.Tensor, ...], options: Options, extras: tuple[object, ...] = ()
) -> tuple[Key, Prepared | None]:
    """Everything that decides how a call runs, and the call that was prepared for that, announced to the peers.

    Equal keys need neither checks nor choices again. operands: x and the weights; extras: named tuples of whatever
    comes beside, or what the caller passed in place of one.
    Raises InputError for operands that are no tensors and options of another type, RankMismatch and PeerError.
    """
    needs_gradient, given = torch.is_grad_enabled(), options.values()
    told: list[object] = [operator, *given, *map(type, given)]  # 1, 1.0 and True are equal, and not the same
    parts: tuple[object, ...] = operands
    for beside in extras:
        told.append(beside.__class__)
        parts += beside if isinstance(beside, tuple) else (beside,)
    try:
        for each in parts:
            if isinstance(each, _Tensor):
                if each.__class__ not in _PLAIN:  # whose address may be asked for only with a warning, if at all
                    _check(group, operator, operands, options, parts)
                misaligned, gradient = each.data_ptr() % ALIGNED_BYTES, needs_gradient and each.requires_grad
                told.append((each.__class__, each.shape, each.stride(), each.dtype, each.device, misaligned, gradient))
            else:
                told.append(None if each is None else (each.__class__, each))
        key = tuple(told)
        calls = _PREPARED.get(group.process_group)
        prepared = None if calls is None else calls.get(key)
    except TypeError:  # nothing can be found by it: whoever reads it will say what is wrong
        key, prepared = (), None
    except RuntimeError:  # it lies nowhere
        _check(group, operator, operands, options, parts)
        raise
    if prepared is None or forward_ad._current_level >= 0:  # a tangent is not to be seen in a key
        _check(group, operator, operands, options, parts)
    if prepared is not None and prepared.board is not None:
        prepared.board.post(prepared.signature)
    return key, prepared


def _check(
    group: Group, operator: str, operands: tuple[torch.Tensor, ...], options: Options, given: tuple[object, ...]
) -> None:
    try:
        check_kinds(operator, operands[0], operands[1:], options)
        for each in given:
            if isinstance(each, torch.Tensor):
                check_plain(f"{operator}: a tensor of extras or norm", each)
    except InputError as error:
        raise refuse(group, error) from None


@lasting()
def prepare(key: Key, problem: Problem, group: Group, tensors: Tensors, plan: str | None) -> Prepared:
    """Chooses and proves the plan of a new call, agrees on it with all ranks, and binds it. tensors: its inputs.

    Raises RankMismatch where ranks ask for different things, InputError for an unknown plan, and PeerError.
    """
    target = target_of(tensors["x"].device)
    known = agreed_knowledge(group, target, problem.operator) if plan is None else None
    try:
        choice = choose(problem, target, known) if plan is None else _asked(problem, target, plan)
        built = None if choice.plan in OUTSIDE else _proven(choice, problem, group.rank)
    except (InputError, ScheduleError) as error:
        raise refuse(group, error) from None
    signature = _signature(problem, choice)
    Board.of(group).agree(signature)
    outputs, make = outputs_of(problem, group.rank), maker(tensors["x"].device)
    try:
        made = {name: make(shape, dtype) for name, shape, dtype in outputs}
        run, bound = _bound(built, choice, problem, (group, as_matrices(tensors) | made))
    except BaseException as error:
        Board.of(group).give_up(error, problem.operator)
        raise
    if bound is not None:
        outputs = tuple(each for each in outputs if each[0] not in bound.makes)
    prepared = Prepared(problem, signature, choice, run, bound, outputs, Board.of(group), make)
    _calls(group).put(key, prepared)
    return prepared


def forget_choices(group: Group, operator: str) -> None:
    """The next call of each signature chooses anew. Every rank forgets at the same point of its calls."""
    _calls(group).forget(operator)


def _calls(group: Group) -> Calls:
    calls = _PREPARED.get(group.process_group)
    if calls is None:
        calls = _PREPARED[group.process_group] = Calls()
    return calls


def refuse(group: Group, error: Refusal) -> Refusal:
    """Tells the peers, who are about to agree on this call, that this rank cannot take part; the error to raise."""
    with suppress(OverweaveError):
        board = Board.of(group)
        board.agree(f"refused: {error}".encode())
        if not board.is_watched:
            board.finish()  # no workspace whose end says so
    return error


def _asked(problem: Problem, target: Target, plan: str) -> Choice:
    """The plan that the caller named, `push` or `push pieces=4`. Raises InputError."""
    what = candidate_of(problem.operator, plan)
    why = _cannot(problem, target, what)
    if why:
        raise InputError(f"{problem.operator} with plan {plan!r}", why, "Leave the choice to overweave")
    return chosen(problem, target, what, ("asked", "the caller asked for it"))


def _cannot(problem: Problem, target: Target, what: Candidate) -> str:
    """Why a plan that was asked for cannot run: what would only be unwise is the caller's affair."""
    if what.is_by_torch and what.options:
        return f"{what.plan} takes no options"
    return obstacle(problem, target, what, "device")


def _proven(choice: Choice, problem: Problem, rank: int) -> Plan:
    """The plan of a choice. Raises InputError and ScheduleRefused."""
    built = build(choice.plan, problem, choice.options, rank=rank)
    verify_plan(built, MachineLimits(), rank=rank).raise_if_refused()
    return built


def _signature(problem: Problem, choice: Choice) -> bytes:
    layout = " b=[n,k]" if problem.b_is_transposed else ""
    gathered = " with the gathered input" if problem.returns_gathered else ""
    done = f" then {problem.epilogue}" if problem.epilogue.bits else ""
    done += f" then {problem.norm}" if problem.norm else ""
    done += f" in {problem.out_dtype}" if problem.out_dtype else ""
    shape = f"{problem.extents} {problem.dtype}{layout}{gathered}{done}"
    options = ",".join(f"{name}={value}" for name, value in sorted(choice.options.items()))
    return f"{choice.plan} {shape} {options}".strip().encode()


def _bound(
    built: Plan | None, choice: Choice, problem: Problem, where: tuple[Group, Tensors]
) -> tuple[Run, Bound | None]:
    """How a plan runs, or what torch has in its place. where: the group, and tensors as it will be called with."""
    group, example = where
    if built is None:
        return bind_by_torch(choice.plan, problem, group, example["x"].device)
    return _bind(built, group, example)


def _bind(plan: Plan, group: Group, tensors: Tensors) -> tuple[Run, Bound | None]:
    if tensors["x"].device.type == "cuda":
        return _bind_aligned(plan, group, tensors) if plan.problem.m else (_do_nothing, None)
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == "output"}
    outputs |= {Z} if plan.problem.norm else set()
    plan = replace(plan, tile_orders=())  # torch computes whole operations here, and the tables are large

    def run(moved: Tensors) -> None:
        inputs = {name: tensor for name, tensor in moved.items() if name not in outputs}
        run_on_host(plan, group, as_matrices(inputs), {name: moved[name] for name in outputs})

    return run, None


def _bind_aligned(plan: Plan, group: Group, tensors: Tensors) -> tuple[Run, Bound]:
    """A tensor of this rank that kernels cannot address is copied: peers, whose tensors are others, must not notice."""
    run: Bound = load("gpu launch")(plan, group, aligned(tensors))
    if all(tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors.values()):
        return run, run

    def run_aligned(moved: Tensors) -> None:
        whole = aligned(moved)
        run(whole)
        moved |= {name: whole[name] for name in run.makes}

    return run_aligned, run


def aligned(tensors: Tensors) -> Tensors:
    """The tensors, each at a multiple of 16 bytes: as it is, or a copy in the same layout."""
    return {name: t.clone() if t.data_ptr() % ALIGNED_BYTES else t for name, t in tensors.items()}


def _do_nothing(tensors: Tensors) -> None:
    """A call without rows: ranks agree on it, and nothing is launched."""
