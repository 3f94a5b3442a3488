"""A call that is new to its group: choose a plan, prove it, agree on it with the peers, and bind it."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace

from overweave.errors import InputError, KernelUnavailable, MachineError, PeerError, ScheduleError
from overweave.ir.plan import X_REST, Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.board.board import Board
from overweave.memory.group import NCCL, Group
from overweave.memory.outside_modes import empty_factory, outside_modes_and_pools
from overweave.ops.call.devices import ALIGNED_BYTES, is_captured
from overweave.ops.call.groups import on_islands, refuse
from overweave.ops.call.prepared import (
    BoundCall,
    CallKey,
    Prepared,
    PreparedRun,
    Tensors,
    calls_of,
    outputs_of,
)
from overweave.ops.call.row_map import maps_of
from overweave.process_settings import current
from overweave.runtime.backends import load
from overweave.runtime.host.host import HostRun, as_matrices
from overweave.runtime.library.calls import LibraryRun, is_library_plan
from overweave.runtime.library.two_parts import takes_parts, whole
from overweave.schedules.catalog.catalog import build
from overweave.schedules.records.outside import OUTSIDE
from overweave.tuner.model.choose import SWITCHED_OFF, Choice, choose, make_choice
from overweave.tuner.space.space import Candidate, candidate_of, library_path, reason_unsupported
from overweave.tuner.space.target import Target, target_of
from overweave.tuner.store.cache import agreed_knowledge

CAPTURED, WORDS_BYTES = b" in a capture", 200  # what ranks tell each other of a call that is captured


def prepare(
    key: CallKey,
    problem: Problem,
    caller: tuple[Group, str],
    tensors: Tensors,
    plan: str | None,
    words: bytes = b"",
) -> Prepared:
    """Chooses and proves the plan of a new call, agrees on it with all ranks, and binds it. tensors: its inputs.

    caller: the group, and the names of the tensors that are differentiated, in which ranks agree: they will compute
    gradients together. words: of this call alone, such as its counts, on which ranks agree as well.
    A plan that nobody asked for, and whose kernel cannot be made here, is replaced by the library path, with a warning.
    Raises RankMismatch where ranks ask for different things, InputError for an unknown plan, and PeerError.
    """
    Board.of(caller[0]).user_calls += 1
    prepared = _prepare(on_islands(problem, caller[0]), caller, tensors, plan, (words, is_captured(tensors["x"])))
    calls_of(caller[0]).put(key, prepared)
    return prepared


@outside_modes_and_pools
def _prepare(
    problem: Problem, caller: tuple[Group, str], tensors: Tensors, plan: str | None, call: tuple[bytes, bool]
) -> Prepared:
    """See `prepare`. call: its words, and whether a graph of the caller's is being captured."""
    group, _ = caller
    target = target_of(tensors["x"].device, group)
    known = agreed_knowledge(group, target, problem.operator) if plan is None else None
    try:
        choice = choose(problem, target, known) if plan is None else _asked(problem, target, plan)
    except (InputError, ScheduleError) as error:
        raise refuse(group, error) from None
    try:
        return _prepared(problem, caller, tensors, choice, call)
    except KernelUnavailable as error:
        library = make_choice(
            problem, target, library_path(problem.operator), ("rule", f"{error.asked}: {error.found}")
        )
        if plan is not None or problem.batch_invariant or choice.plan == library.plan:
            raise
        warnings.warn(f"overweave: {error} Until then {problem.operator} takes the library path", stacklevel=5)
    return _prepared(problem, caller, tensors, library, call)


def _prepared(
    problem: Problem, caller: tuple[Group, str], tensors: Tensors, choice: Choice, call: tuple[bytes, bool]
) -> Prepared:
    """The call by a plan that was chosen for it: proven, agreed on and bound."""
    group, gradients = caller
    words, captured = call
    try:
        built = None if choice.plan in OUTSIDE else _proven(choice, problem, group.rank)
    except (InputError, ScheduleError) as error:
        raise refuse(group, error) from None
    signature = _signature(problem, choice, gradients)
    Board.of(group).agree(signature + words + (CAPTURED if captured else b""))
    outputs, make = outputs_of(problem, group.rank), empty_factory(tensors["x"].device)
    try:
        made = {name: make(shape, dtype) for name, shape, dtype in outputs}
        bind = _bound_in_capture if captured else _bound
        run, bound = bind(built, choice, problem, (group, as_matrices(tensors) | made))
    except BaseException as error:
        Board.of(group).report_failure(error, problem.operator)
        raise
    if built is not None and built.problem.strip:
        run = _with_map(run, maps_of(built.problem, group.rank, tensors["x"].device))
    if bound is not None:
        outputs = tuple(each for each in outputs if each[0] not in bound.allocated_outputs)
    kept = (bound, outputs, Board.of(group), make)
    return Prepared(problem.operator, signature, run, *kept, problem=problem, choice=choice)


def _asked(problem: Problem, target: Target, plan: str) -> Choice:
    """The plan that the caller named, `push` or `push pieces=4`. Raises InputError."""
    what = candidate_of(problem.operator, plan)
    why = _cannot(problem, target, what)
    if why:
        cure = "Leave the choice to overweave"
        cure = f"{cure}, or call under {SWITCHED_OFF}" if problem.batch_invariant else cure
        raise InputError(f"{problem.operator} with plan {plan!r}", why, cure)
    return make_choice(problem, target, what, ("asked", "the caller asked for it"))


def _cannot(problem: Problem, target: Target, what: Candidate) -> str:
    """Why a plan that was asked for cannot run: what would only be unwise is the caller's affair."""
    if what.is_by_torch and what.options:
        return f"{what.plan} takes no options"
    return reason_unsupported(problem, target, what, "device")


def _proven(choice: Choice, problem: Problem, rank: int) -> Plan:
    """The plan of a choice. Raises InputError and ScheduleRefused."""
    built = build(choice.plan, problem, choice.options, rank=rank)
    verify_plan(built, MachineLimits(), rank=rank).raise_if_refused()
    return built


def _signature(problem: Problem, choice: Choice, gradients: str) -> bytes:
    layout = " b=[n,k]" if problem.b_is_transposed else ""
    gathered = " with the gathered input" if problem.returns_gathered else ""
    done = "".join(f" then {ending}" for ending in problem.endings)
    done += f" in {problem.out_dtype}" if problem.out_dtype else ""
    done += f" with gradients of {gradients}" if gradients else ""
    shape = f"{problem.extents} {problem.dtype}{layout}{gathered}{done}{current().words}"
    options = ",".join(f"{name}={value}" for name, value in sorted(choice.options.items()))
    return f"{shape} by {choice.plan} {options}".strip().encode()


def _with_map(run: PreparedRun, maps: Tensors) -> PreparedRun:
    """The same, with the map of the result's rows beside it."""

    def run_with_map(moved: Tensors) -> None:
        run(moved)
        moved |= maps

    return run_with_map


def _with_whole_factors(run: PreparedRun) -> PreparedRun:
    """The same, of a call whose factors lie in two parts."""

    def run_whole(moved: Tensors) -> None:
        laid = whole(moved)
        run(laid)
        moved |= {name: each for name, each in laid.items() if name not in ("x", "w")}

    return run_whole


def _bound(
    built: Plan | None, choice: Choice, problem: Problem, where: tuple[Group, Tensors]
) -> tuple[PreparedRun, BoundCall | None]:
    """How a plan runs, or what torch has in its place. where: the group, and tensors as it will be called with."""
    group, example = where
    if X_REST in example and not takes_parts(built):
        run, keeps = _bound(built, choice, problem, (group, whole(example)))
        return _with_whole_factors(run), keeps
    if built is None:
        bound: tuple[PreparedRun, BoundCall | None] = load("gpu torch")(
            OUTSIDE[choice.plan].curve, problem, group, example
        )
        return bound
    return _bind(built, group, example)


def _bound_in_capture(
    built: Plan | None, choice: Choice, problem: Problem, where: tuple[Group, Tensors]
) -> tuple[PreparedRun, BoundCall | None]:
    """As `_bound`, while a graph is captured; by a library's calls on all ranks, where one of them cannot have it.

    Raises InputError where no library's calls can be captured either.
    """
    group, _ = where
    found, why = None, ""
    try:
        found = _bound(built, choice, problem, where)
    except PeerError:
        raise
    except (RuntimeError, MachineError) as error:
        why = f"{type(error).__name__}: {error}"
    reasons = [each.decode(errors="replace") for each in Board.of(group).all_gather_bytes(why.encode()[:WORDS_BYTES])]
    if found is not None and not any(reasons):
        return found
    asked, cure = f"capture {problem.operator}", "Make the same call once before the capture"
    told = f"the first call of its kind cannot be prepared there ({next(filter(None, reasons))})"
    has_library = dist.get_backend(group.process_group) == NCCL and not problem.batch_invariant
    if not has_library or (built is not None and built.problem.strip):
        raise InputError(asked, told, cure)
    warnings.warn(f"{asked}: {told}; a library computes it. {cure}.", stacklevel=2)
    library = library_path(problem.operator)
    plan = build(library.schedule(problem.operator), problem, dict(library.options), rank=group.rank)
    return _bound(plan, choice, problem, where)


def _bind(plan: Plan, group: Group, tensors: Tensors) -> tuple[PreparedRun, BoundCall | None]:
    if tensors["x"].device.type == "cpu":
        # Torch computes whole operations there, and the tables are large.
        return HostRun(replace(plan, tile_orders=()), group), None
    return _bind_aligned(plan, group, tensors) if plan.problem.m else (_do_nothing, None)


def _bind_aligned(plan: Plan, group: Group, tensors: Tensors) -> tuple[PreparedRun, BoundCall]:
    """A tensor of this rank that kernels cannot address is copied: peers, whose tensors are others, must not notice."""
    bind: Any = LibraryRun if is_library_plan(plan) else load("gpu launch")
    run: BoundCall = bind(plan, group, aligned(tensors))
    if all(tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors.values()):
        return run, run

    def run_aligned(moved: Tensors) -> None:
        whole = aligned(moved)
        run(whole)
        moved |= {name: whole[name] for name in run.allocated_outputs}

    return run_aligned, run


def aligned(tensors: Tensors) -> Tensors:
    """The tensors, each at a multiple of 16 bytes: as it is, or a copy in the same layout."""
    return {name: t.clone() if t.data_ptr() % ALIGNED_BYTES else t for name, t in tensors.items()}


def _do_nothing(tensors: Tensors) -> None:
    """A call without rows: ranks agree on it, and nothing is launched."""
