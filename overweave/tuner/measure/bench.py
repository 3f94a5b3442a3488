"""The comparison of an operator's methods over a shape set, on one rank.

A method that cannot run, or is wrong, is reported with the reason. Errors of the comparison itself (no group, no such
operator) are raised on every rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from overweave.compat.versions import installed
from overweave.errors import InputError, MachineError
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.tuner.measure.baselines import (
    CEILING,
    COMMUNICATION,
    MATMUL,
    OURS,
    SEQUENTIAL,
    TORCH,
    TORCH_FUSED,
    BaselineMethod,
    BenchSide,
    OperatorCall,
    Setting,
    methods_of,
)
from overweave.tuner.measure.timer import (
    Effort,
    Ratio,
    Samples,
    geometric_mean,
    is_replayed,
    median,
    p90,
    paired_ratio,
    with_graph_warmup,
)
from overweave.tuner.measure.trial import TimedTrial
from overweave.tuner.model.choose import choose
from overweave.tuner.space.shapes import DTYPES, DtypeWord, ShapeCase
from overweave.tuner.space.target import target_of
from overweave.tuner.store.cache import agreed_knowledge

# All are formed from medians of one run of all methods, never from numbers of different runs.


class Roofs(Struct, frozen=True, kw_only=True):
    """The times that a method is compared with, in microseconds.

    matmul_us: the fastest un-split matmul alone.           communication_us: NCCL's collective alone.
    sequential_us: that matmul and that collective, one after the other, as a user would write it.
    ceiling_us: the matmul beside an independent transfer of the same size on the copy engine, without any waits; None
    if there is no copy engine.
    """

    matmul_us: float
    communication_us: float
    sequential_us: float
    ceiling_us: float | None = None


class Measures(Struct, frozen=True, kw_only=True):
    """The measures of a method. Ratios have no unit; None if a roof is missing or a denominator is zero.

    exposed_us: effective communication time: the call's time beyond the matmul (Flux 5.1).
    overlap_efficiency: the part of the sequential method's communication that is hidden (Flux 5.1).
    overlap_ratio: the part of the collective's own time that is saved (TileLink 5).
    ceiling_fraction: 1 if the method is as fast as without any waits.
    """

    exposed_us: float
    overlap_efficiency: float | None
    overlap_ratio: float | None
    ceiling_fraction: float | None


def measure(time_us: float, roofs: Roofs) -> Measures:
    """Return the measures of a method that takes `time_us`. Negative ones are losses and are shown as such."""
    exposed_us = time_us - roofs.matmul_us
    hideable_us = roofs.sequential_us - roofs.matmul_us
    saved_us = roofs.matmul_us + roofs.communication_us - time_us
    return Measures(
        exposed_us=exposed_us,
        overlap_efficiency=1 - exposed_us / hideable_us if hideable_us > 0 else None,
        overlap_ratio=saved_us / roofs.communication_us if roofs.communication_us > 0 else None,
        ceiling_fraction=roofs.ceiling_us / time_us if roofs.ceiling_us is not None else None,
    )


# Ranks on one GPU: torch maps memory between them only with the first; copies and kernels get separate queues by the
# second.
SHARED_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
TIMEOUT = timedelta(seconds=120)
PACKAGES = ("overweave", "torch", "triton", "cuda-bindings")


class BenchRequest(Struct, frozen=True, kw_only=True):
    """What to compare. plans: names from the catalog to time in place of our own choice."""

    operator: str
    cases: tuple[ShapeCase, ...] = ()
    device: Literal["cpu", "cuda"]
    dtype: DtypeWord = "bf16"
    plans: tuple[str, ...] = ()
    effort: Effort = Effort()


class MethodRow(Struct, frozen=True, kw_only=True):
    """One method on one case, in microseconds, slowest rank.

    speedups: paired ratios of a baseline's time over this one's, by the baseline's name; `torch_fused` is the fastest
    of torch's operators. measures: for methods that compute the operator. plan: what ran, as the operators' `plan=`
    takes it; empty for baselines, and in files from before it was written.
    """

    name: str
    label: str
    median_us: float
    p90_us: float
    host_us: float | None
    speedups: dict[str, Ratio]
    measures: Measures | None
    plan: str = ""


class CaseRows(Struct, frozen=True, kw_only=True):
    """All methods on one case. left_out: reasons by name. is_replayed: every method ran as captured graphs, as decoding
    does; its host cost is that of a replay. group: over which a mean is formed, beside that of all cases."""

    case: ShapeCase
    methods: tuple[MethodRow, ...]
    left_out: dict[str, str]
    is_replayed: bool = False
    group: str = ""


class BenchRun(Struct, frozen=True, kw_only=True):
    """One whole run: where, when, with which software, and every row."""

    operator: str
    world_size: int
    device: str
    dtype: str
    effort: Effort
    date: str
    versions: dict[str, str]
    devices: tuple[str, ...]
    cases: tuple[CaseRows, ...]


@contextmanager
def join_world(device: str) -> Iterator[Group]:
    """Join the world that torchrun's variables describe. Raises InputError without them. More ranks than GPUs share
    them, with gloo: NCCL cannot have two ranks on a GPU. Raises MachineError if the environment does not allow that."""
    if "RANK" not in os.environ:
        raise InputError("join the world", "RANK is not set", "Start under torchrun")
    if device == "cuda":
        is_shared = int(os.environ["LOCAL_WORLD_SIZE"]) > device_count()
        if is_shared and not SHARED_GPU.items() <= os.environ.items():
            cure = f"Start without torchrun, or set {' '.join(f'{name}={value}' for name, value in SHARED_GPU.items())}"
            raise MachineError("join the world", f"more ranks than GPUs, which are {device_count()}", cure)
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % device_count())
        torch.cuda.set_device(own)
        if is_shared:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        else:
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=own)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield resolve(None)
    finally:
        dist.destroy_process_group()


def device_count() -> int:
    """Return how many GPUs this machine offers."""
    return torch.cuda.device_count()


def runs(
    request: BenchRequest,
    group: Group,
    operator_for: Callable[[Problem], OperatorCall],
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[BenchRun]:
    """Compare the methods, and yield the run so far after each case. Collective. operator_for: returns our operator's
    call for a problem. on_progress: called with the case and the fraction of it that is done."""
    operator_of(request.operator, "bench")
    device = rank_device(request.device)
    setting = Setting(group, device, getattr(torch, DTYPES[request.dtype]), operator_for)
    so_far = new_run(request, group)
    for case in request.cases:
        on_round = partial(on_progress, case.name) if on_progress is not None else None
        so_far = replace(so_far, cases=(*so_far.cases, _rows_of(case, request, setting, on_round)))
        yield so_far


def rank_device(kind: str) -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _devices(kind: str) -> tuple[torch.device, ...]:
    return tuple(torch.device(kind, index) for index in range(device_count() if kind == "cuda" else 1))


def new_run(request: BenchRequest, group: Group) -> BenchRun:
    """Return the run before its first case: where, when and with which software."""
    return BenchRun(
        operator=request.operator,
        world_size=group.world_size,
        device=request.device,
        dtype=request.dtype,
        effort=request.effort,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: installed(package) for package in PACKAGES},
        devices=tuple(target_of(device).device(group.world_size) for device in _devices(request.device)),
        cases=(),
    )


def _rows_of(
    case: ShapeCase, request: BenchRequest, setting: Setting, on_round: Callable[[float], None] | None
) -> CaseRows:
    """Time all methods on one case."""
    problem = case.problem(request.operator, setting.group.world_size, request.dtype)
    side, methods = BenchSide(problem, setting), methods_of(request.operator, request.plans)
    lacking = {method.name: why for method in methods if (why := method.lacks(side))}
    as_graphs = is_replayed(setting.device, case.m)
    trial = TimedTrial(setting, with_graph_warmup(request.effort, setting.device), side.sequential(0), as_graphs)
    calls = {method.name: method.of(side) for method in methods if method.name not in lacking}
    samples = trial.times(calls, [method.name for method in methods if method.is_roof], on_round)
    why_not, roofs = lacking | trial.left_out, _roofs(samples)
    rows = (_row(each, samples, roofs, _plan(each, problem, setting)) for each in methods if each.name not in why_not)
    left_out = {method.name: why_not[method.name] for method in methods if method.name in why_not}
    return CaseRows(case=case, methods=tuple(rows), left_out=left_out, is_replayed=as_graphs)


def _plan(method: BaselineMethod, problem: Problem, setting: Setting) -> str:
    """Return the plan that a method of ours ran. The operator's own choice is made again: it depends only on the
    problem and the group's measurements."""
    if method.name != OURS:
        return method.plan
    target = target_of(setting.device, setting.group)
    return choose(problem, target, agreed_knowledge(setting.group, target, problem.operator)).text


def _roofs(samples: Samples) -> Roofs:
    times = {name: median(values) for name, values in samples.device_us.items()}
    return Roofs(
        matmul_us=times[MATMUL],
        communication_us=times[COMMUNICATION],
        sequential_us=times[SEQUENTIAL],
        ceiling_us=times.get(CEILING),
    )


def _row(method: BaselineMethod, samples: Samples, roofs: Roofs, plan: str) -> MethodRow:
    row = row_of((method.name, method.label), samples, plan)
    if method.is_roof:
        return replace(row, speedups={})
    return replace(row, measures=measure(row.median_us, roofs))


def row_of(named: tuple[str, str], samples: Samples, plan: str) -> MethodRow:
    """Return the row of a method, by its name and label, compared with the baselines. plan: what ran."""
    (name, label), own = named, samples.device_us[named[0]]
    return MethodRow(
        name=name,
        label=label,
        median_us=median(own),
        p90_us=p90(own),
        host_us=samples.host_us.get(name),
        speedups={other: paired_ratio(theirs, own) for other, theirs in _baselines(samples).items()},
        measures=None,
        plan=plan,
    )


def _baselines(samples: Samples) -> dict[str, tuple[float, ...]]:
    """Return the times that methods are compared with: NCCL and cuBLAS in sequence, and the fastest of torch's
    operators."""
    times = samples.device_us
    by_torch = [times[name] for name in TORCH if name in times]
    fastest = {TORCH_FUSED: min(by_torch, key=median)} if by_torch else {}
    return {SEQUENTIAL: times[SEQUENTIAL], **fastest}


class MethodSummary(Struct, frozen=True, kw_only=True):
    """A method over all cases in which it took part; None if the baseline took part in none of them.

    speedups: geometric mean, by baseline. slowest: the least speedup over the sequential method. efficiency: mean
    overlap efficiency. plans: plan -> number of cases in which ours ran it.
    """

    name: str
    label: str
    cases: int
    time_us: float
    speedups: dict[str, float]
    slowest: float | None
    efficiency: float | None
    plans: dict[str, int] = {}


class Spread(Struct, frozen=True):
    """A number over whole runs: the least, the middle run's, the largest."""

    least: float
    middle: float
    largest: float


def summarize(run: BenchRun) -> tuple[MethodSummary, ...]:
    """Return one line per method, in the order of the rows."""
    by_name: dict[str, list[MethodRow]] = {}
    for case in run.cases:
        for row in case.methods:
            by_name.setdefault(row.name, []).append(row)
    return tuple(_summary(rows) for rows in by_name.values())


class GroupSummary(Struct, frozen=True, kw_only=True):
    """The quickest of our rows in each case of a group, in the geometric mean; None without a ceiling.

    speedup: over the sequential method, and slowest: the least of them. ceiling: the part of the ceiling's speed.
    """

    group: str
    cases: int
    speedup: float
    slowest: float
    ceiling: float | None


def summarize_groups(run: BenchRun) -> tuple[GroupSummary, ...]:
    """Return one line per group of cases in which methods of ours took part."""
    quickest: dict[str, list[MethodRow]] = {}
    for case in run.cases:
        ours = [row for row in case.methods if row.plan or row.name == OURS]
        if case.group and ours:
            quickest.setdefault(case.group, []).append(min(ours, key=lambda row: row.median_us))
    return tuple(_group_summary(group, rows) for group, rows in quickest.items())


def _group_summary(group: str, rows: list[MethodRow]) -> GroupSummary:
    speedups = [row.speedups[SEQUENTIAL].value for row in rows]
    fractions = [row.measures.ceiling_fraction for row in rows if row.measures and row.measures.ceiling_fraction]
    return GroupSummary(
        group=group,
        cases=len(rows),
        speedup=geometric_mean(speedups),
        slowest=min(speedups),
        ceiling=geometric_mean(fractions) if fractions else None,
    )


def middle(runs: tuple[BenchRun, ...], method: str) -> int:
    """Return the index of the middle run, by the geometric mean of a method's times; if it took no part, of all
    methods."""
    times = [_time_us(run, method) for run in runs]
    ordered = sorted(range(len(runs)), key=lambda index: times[index])
    return ordered[(len(ordered) - 1) // 2]


def spread(runs: tuple[BenchRun, ...], middle_run: int) -> dict[str, dict[str, Spread]]:
    """Return for each method and each of its summary numbers its least, middle and largest value over whole runs."""
    summaries = [{line.name: _numbers(line) for line in summarize(run)} for run in runs]
    table: dict[str, dict[str, Spread]] = {}
    for name, numbers in summaries[middle_run].items():
        for key, value in numbers.items():
            values = [other[name][key] for other in summaries if key in other.get(name, {})]
            table.setdefault(name, {})[key] = Spread(min(values), value, max(values))
    return table


def regressions(run: BenchRun, method: str) -> tuple[CaseRows, ...]:
    """Return the cases in which a method is slower than the sequential one."""
    return tuple(
        case
        for case in run.cases
        for row in case.methods
        if row.name == method and SEQUENTIAL in row.speedups and row.speedups[SEQUENTIAL].value < 1
    )


def _summary(rows: list[MethodRow]) -> MethodSummary:
    ratios = {
        baseline: [row.speedups[baseline].value for row in rows if baseline in row.speedups]
        for baseline in (SEQUENTIAL, TORCH_FUSED)
    }
    efficiencies = [
        row.measures.overlap_efficiency
        for row in rows
        if row.measures is not None and row.measures.overlap_efficiency is not None
    ]
    return MethodSummary(
        name=rows[0].name,
        label=rows[0].label,
        cases=len(rows),
        time_us=geometric_mean([row.median_us for row in rows]),
        speedups={baseline: geometric_mean(values) for baseline, values in ratios.items() if values},
        slowest=min(ratios[SEQUENTIAL], default=None),
        efficiency=sum(efficiencies) / len(efficiencies) if efficiencies else None,
        plans=dict(Counter(row.plan for row in rows if row.plan).most_common()),
    )


def _time_us(run: BenchRun, method: str) -> float:
    lines = {line.name: line.time_us for line in summarize(run)}
    return lines.get(method, median(list(lines.values())))


def _numbers(line: MethodSummary) -> dict[str, float]:
    numbers = {"time_us": line.time_us, **{f"speedup.{name}": value for name, value in line.speedups.items()}}
    optional = {"slowest": line.slowest, "efficiency": line.efficiency}
    return numbers | {key: value for key, value in optional.items() if value is not None}
