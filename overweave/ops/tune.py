"""Tuning by measurement: which plan an operator takes for a problem from now on, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.ops.call.devices import current, own_device
from overweave.ops.call.groups import GroupLike, group_of, on_islands, refuse
from overweave.ops.call.prepared import calls_of
from overweave.ops.explain import device_of, problem_to_choose_for
from overweave.ops.operators import operator_for
from overweave.process_settings import current as current_settings
from overweave.tuner.measure.baselines import Setting
from overweave.tuner.measure.search import EFFORT, OnRound, Tuned, tune_problem
from overweave.tuner.measure.timer import Effort
from overweave.tuner.model.choose import SWITCHED_OFF, Choice, choose
from overweave.tuner.space.target import target_of
from overweave.tuner.store.cache import agreed_knowledge, fingerprint, learn, save


def tune(
    operator: str,
    *,
    m: int,
    n: int | Sequence[int],
    k: int,
    group: GroupLike = None,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str | None = None,
    after: str = "",
) -> Choice:
    """Measures the candidates for `[m, k] @ [k, n]` on each rank and keeps the quickest. Collective; takes seconds.

    m: rows after the gather or before the scatter, rounded up to its bucket (tuner/store/cache.py); n and k: as one
    rank's matmul has them; n, a list or tuple: the columns of each of several weights. dtype: fp8 (e4m3) is scaled by
    rows, into bf16. group: as the operators take it. device: this rank's; by default its GPU, or the CPU without one.
    after: what happens to the product, as `overweave.explain` takes it.

    From then on calls of this group choose by it, and every process of this user on such a machine does. Returns the
    choice; print it, or `overweave explain` it. Ranks wait for each other throughout. Raises InputError for what is no
    problem or no device, RankMismatch on every rank where they differ, PeerError, and MachineError if nothing runs.
    """
    resolved = group_of(group)
    try:
        where = device_named(device)
        problem = problem_to_choose_for("tune", operator, (m, n, k), (resolved.world_size, dtype, after))
        if current_settings().batch_invariant:
            found = "batch-invariant calls all have the same tiles, which are not tuned"
            raise InputError(f"tune {operator}", found, f"Tune under {SWITCHED_OFF}")
        if not problem.m:
            raise InputError(f"tune {operator}", "m=0", "Pass at least one row")
    except InputError as error:
        raise refuse(resolved, error) from None
    with resolved.lock, current(where):
        tune_and_learn(problem, resolved, where)
    target = target_of(where, resolved)
    return choose(on_islands(problem, resolved), target, agreed_knowledge(resolved, target, problem.operator))


def tune_and_learn(
    problem: Problem, group: Group, device: torch.device, effort: Effort = EFFORT, on_round: OnRound | None = None
) -> Tuned:
    """Measures a problem, keeps what came out, and lets the group choose by it. Collective."""
    target, problem = target_of(device, group), on_islands(problem, group)
    agreed_knowledge(group, target, problem.operator)
    setting = Setting(group, device, getattr(torch, problem.dtype), operator_for)
    tuned = tune_problem(problem, setting, target, effort, on_round)
    learn(group, target, tuned.entry)
    calls_of(group).forget(problem.operator)
    if group.rank == 0:
        save((tuned.entry,), fingerprint(target, group.world_size))
    # A rank that goes on to another group reads the file again: not before it is written.
    board = Board.of(group)
    board.agree(b"go on after tuning")
    board.finish()
    return tuned


def device_named(device: torch.device | str | None) -> torch.device:
    """A device by name; None: this process's GPU, or the CPU of a machine without one. Raises InputError."""
    if device is None:
        return own_device()
    where = device_of("tune", device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"tune on device {device}", "this process sees no GPU", "Use cpu, or see `overweave doctor`")
    return where
