"""From an operator's tensors to a Plan that runs: agree with the peers, choose, prove, bind once, then call.

The first call of a signature waits for all ranks and raises on every rank if they differ; later calls only post what
they are about to do (memory/board.py).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overweave.errors import InputError, OverweaveError, ScheduleError
from overweave.ir.plan import Plan, Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.board import Board
from overweave.memory.group import Group, resolve
from overweave.ops.arguments import check_kinds
from overweave.ops.cuda import bind_on_gpu
from overweave.runtime.host import run_on_host
from overweave.schedules.catalog import build
from overweave.tuner.choose import Choice, Target, choose, kernel_obstacle, tile_options

GroupLike = dist.ProcessGroup | dist.DeviceMesh | str | None
Tensors = dict[str, torch.Tensor]
Run = Callable[[Tensors], None]
Key = tuple[object, ...]
ALIGNED_BYTES = 16


class Prepared(NamedTuple):
    """A call that all ranks agreed on once: its problem, the choice made for it, and how it runs."""

    problem: Problem
    signature: bytes
    choice: Choice
    run: Run


_PREPARED: WeakKeyDictionary[dist.ProcessGroup, dict[Key, Prepared]] = WeakKeyDictionary()
atexit.register(_PREPARED.clear)  # a process group must not outlive the interpreter
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
atexit.register(_GROUPS.clear)  # a process group must not outlive the interpreter


def group_of(group: GroupLike) -> Group:
    """What the caller means by `group`, remembered. Raises GroupError."""
    key = dist.group.WORLD if group is None else group
    if isinstance(key, dist.ProcessGroup):
        known = _GROUPS.get(key)
        if known is None:
            known = _GROUPS[key] = resolve(key)
        return known
    return resolve(group)


def key_of(group: Group, operator: str, x: torch.Tensor, w: torch.Tensor, options: Mapping[str, object]) -> Key:
    """Everything that decides how a call runs: equal keys need neither checks nor choices again. Raises InputError."""
    try:
        check_kinds(operator, x, w, options)
    except InputError as error:
        raise refuse(group, error) from None
    misaligned = (x.data_ptr() | w.data_ptr()) % ALIGNED_BYTES
    gradient = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    operands = (x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device)
    return (operator, *operands, misaligned, gradient, *options.values())


def prepared_call(group: Group, key: Key) -> Prepared | None:
    """The call that was prepared under this key, announced to the peers. Raises RankMismatch and PeerError."""
    prepared = _PREPARED.setdefault(group.process_group, {}).get(key)
    if prepared is not None:
        Board.of(group).post(prepared.signature)
    return prepared


def prepare(key: Key, problem: Problem, group: Group, tensors: Tensors, plan: str | None) -> Prepared:
    """Chooses and proves the plan of a new call, agrees on it with all ranks, and binds it.

    Raises RankMismatch where ranks ask for different things, InputError for an unknown plan, and PeerError.
    """
    target = target_of(tensors["x"].device)
    try:
        choice = choose(problem, target) if plan is None else _asked(problem, target, plan)
        built = build(choice.plan, problem, choice.options, rank=group.rank)
        verify_plan(built, MachineLimits(), rank=group.rank).raise_if_refused()
    except (InputError, ScheduleError) as error:
        raise refuse(group, error) from None
    signature = _signature(problem, choice)
    Board.of(group).agree(signature)
    prepared = Prepared(problem, signature, choice, _bind(built, group, tensors))
    _PREPARED.setdefault(group.process_group, {})[key] = prepared
    return prepared


def refuse(group: Group, error: OverweaveError) -> OverweaveError:
    """Tells the peers, who are about to agree on this call, that this rank cannot take part; the error to raise."""
    with suppress(OverweaveError):
        Board.of(group).agree(f"refused: {error}".encode())
    return error


def target_of(device: torch.device) -> Target:
    """What a device means to the choice of a plan."""
    if device.type == "cpu":
        return Target("cpu")
    properties = torch.cuda.get_device_properties(device)
    return Target("cuda", properties.multi_processor_count, properties.major == 9)


def _asked(problem: Problem, target: Target, plan: str) -> Choice:
    """The plan that the caller named, `push` or `push pieces=4`. Raises InputError."""
    name, *pairs = plan.split() or [""]
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            found = f"{pair!r} is no option" if not separator else f"{option} is given twice"
            raise InputError(f"plan {plan!r}", found, "Write NAME option=value ...")
        options[option] = value
    if name in ("push", "pull", "scatter"):
        obstacle = kernel_obstacle(problem, target)
        if obstacle:
            raise InputError(f"{problem.operator} with plan {plan!r}", obstacle, "Leave the choice to overweave")
        options = tile_options(target) | options
    return Choice(f"{problem.operator}.{name}", options, "the caller asked for it")


def _signature(problem: Problem, choice: Choice) -> bytes:
    layout = " b=[n,k]" if problem.b_is_transposed else ""
    gathered = " with the gathered input" if problem.returns_gathered else ""
    shape = f"m={problem.m} n={problem.n} k={problem.k} {problem.dtype}{layout}{gathered}"
    options = ",".join(f"{name}={value}" for name, value in sorted(choice.options.items()))
    return f"{choice.plan} {shape} {options}".strip().encode()


def _bind(plan: Plan, group: Group, tensors: Tensors) -> Run:
    if tensors["x"].device.type == "cuda":
        return _bind_aligned(plan, group, tensors) if plan.problem.m else _do_nothing
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == "output"}

    def run(moved: Tensors) -> None:
        inputs = {name: tensor for name, tensor in moved.items() if name not in outputs}
        run_on_host(plan, group, inputs, {name: moved[name] for name in outputs})

    return run


def _bind_aligned(plan: Plan, group: Group, tensors: Tensors) -> Run:
    """A tensor of this rank that kernels cannot address is copied: peers, whose tensors are others, must not notice."""
    run = bind_on_gpu(plan, group, aligned(tensors))
    if all(tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors.values()):
        return run
    return lambda moved: run(aligned(moved))


def aligned(tensors: Tensors) -> Tensors:
    """The tensors, each at a multiple of 16 bytes: as it is, or a copy in the same layout."""
    return {name: t.clone() if t.data_ptr() % ALIGNED_BYTES else t for name, t in tensors.items()}


def _do_nothing(tensors: Tensors) -> None:
    """A call without rows: ranks agree on it, and nothing is launched."""
