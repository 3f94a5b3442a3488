"""One comparison of an operator's methods over a shape set, as one of its ranks runs it.

A method is tried once on every rank before it is timed: one that cannot run, or whose result is wrong, on any rank is
left out on all, with the reason. Errors of a comparison itself (no group, no such operator) are raised on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Literal

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.tuner.measure.attempt import attempt, copied
from overweave.tuner.measure.baselines import (
    CEILING,
    COMMUNICATION,
    MATMUL,
    NAMED,
    OURS,
    PER_SHARD,
    SEQUENTIAL,
    TORCH,
    TORCH_FUSED,
    Method,
    methods_of,
)
from overweave.tuner.measure.measures import Measures, Roofs, measure
from overweave.tuner.measure.replay import captured, is_replayed, settled
from overweave.tuner.measure.sides import Call, OperatorCall, Setting, Side
from overweave.tuner.measure.statistics import Ratio, median, p90, paired_ratio
from overweave.tuner.measure.timer import Effort, Samples, compare
from overweave.tuner.model.choose import choose
from overweave.tuner.space.shapes import DTYPES, Case, DtypeWord
from overweave.tuner.space.target import target_of
from overweave.tuner.store.agreement import agreed_knowledge
from overweave.tuner.store.cache import version_of

# Multicast can put shared GPUs out of service; no comparison may use it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
TIMEOUT = timedelta(seconds=120)
PACKAGES = ("overweave", "torch", "triton", "cuda-bindings")


class Request(Struct, frozen=True, kw_only=True):
    """What to compare. plans: names from the catalog to time in place of our own choice."""

    operator: str
    cases: tuple[Case, ...]
    device: Literal["cpu", "cuda"]
    dtype: DtypeWord = "bf16"
    plans: tuple[str, ...] = ()
    effort: Effort = Effort()


class MethodRow(Struct, frozen=True, kw_only=True):
    """One method on one case, in microseconds, slowest rank.

    speedups: paired ratios of a baseline's time over this one's, by the baseline's name; `torch_fused` is the quickest
    of what torch ships. measures: for methods that compute the operator. plan: of ours, what ran, as the operators'
    `plan=` takes it; empty for the others, and in files from before it was written.
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
    """All methods on one case. left_out: reasons by name.

    is_replayed: every method ran as captured graphs, as decoding does; its host cost is that of a replay.
    """

    case: Case
    methods: tuple[MethodRow, ...]
    left_out: dict[str, str]
    is_replayed: bool = False


class Run(Struct, frozen=True, kw_only=True):
    """One whole run: where, when, with what, and every row."""

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
def joined_world(device: str) -> Iterator[Group]:
    """This process as a rank of the world that torchrun's variables describe. Raises InputError without them."""
    if "RANK" not in os.environ:
        raise InputError("join the world", "RANK is not set", "Start under torchrun")
    os.environ.update(NO_MULTICAST)
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=own)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield resolve(None)
    finally:
        dist.destroy_process_group()


def device_count() -> int:
    """How many GPUs this machine offers."""
    return torch.cuda.device_count()


def run(
    request: Request,
    group: Group,
    operator_for: Callable[[Problem], OperatorCall],
    on_progress: Callable[[str, float], None] | None = None,
    on_case: Callable[[Run], None] | None = None,
) -> Run:
    """Compares the methods on every case. Collective. `on_progress` is told the case and which part of it is done.

    operator_for: what is called ours on a problem. on_case: is told the run as far as it is, after each of its cases.
    """
    operator_of(request.operator, "bench")
    is_cuda = request.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    dtype = getattr(torch, DTYPES[request.dtype])
    setting = Setting(group, device, dtype, operator_for)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if is_cuda else ["cpu"]
    so_far = Run(
        operator=request.operator,
        world_size=group.world_size,
        device=request.device,
        dtype=request.dtype,
        effort=request.effort,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={package: version_of(package) for package in PACKAGES},
        devices=tuple(names),
        cases=(),
    )
    for case in request.cases:
        so_far = replace(so_far, cases=(*so_far.cases, _bench_case(case, request, setting, on_progress)))
        if on_case is not None:
            on_case(so_far)
    return so_far


def _bench_case(
    case: Case, request: Request, setting: Setting, on_progress: Callable[[str, float], None] | None
) -> CaseRows:
    problem = case.problem(request.operator, setting.group.world_size, request.dtype)
    this = Side(problem, setting)
    left_out: dict[str, str] = {}
    usable: dict[Method, Call] = {}
    expected = copied(this.sequential(0))
    for method in methods_of(request.operator, request.plans):
        wanted = expected if method.gives_result else None
        call = method.call(this)
        reason = method.lacks(setting, case.m) or attempt(call, wanted, setting)
        if not reason and is_replayed(setting, case.m):
            call, reason = captured(call, wanted, setting)
        if reason:
            left_out[method.name] = reason
        else:
            usable[method] = call
    effort = settled(request.effort, setting)
    turns = effort.rounds + effort.warmup

    def on_round(turn: int) -> None:
        if on_progress is not None:
            on_progress(case.name, (turn + 1) / turns)

    calls = {method.name: call for method, call in usable.items()}
    samples = compare(calls, setting.device, setting.group.process_group, effort, on_round)
    roofs, plans = _roofs(samples), _plans(usable, problem, setting)
    rows = tuple(_row(method, samples, roofs, plans.get(method.name, "")) for method in usable)
    return CaseRows(case=case, methods=rows, left_out=left_out, is_replayed=is_replayed(setting, case.m))


def _plans(usable: Iterable[Method], problem: Problem, setting: Setting) -> dict[str, str]:
    """What the methods of ours ran. The operator chose as is chosen here: by the problem and what the group knows."""
    target = target_of(setting.device)
    plans = {PER_SHARD: PER_SHARD} | {m.name: m.name.removeprefix(NAMED) for m in usable if m.name.startswith(NAMED)}
    if any(method.name == OURS for method in usable):
        plans[OURS] = choose(problem, target, agreed_knowledge(setting.group, target, problem.operator)).text
    return plans


def _roofs(samples: Samples) -> Roofs:
    times = {name: median(values) for name, values in samples.device_us.items()}
    return Roofs(
        matmul_us=times[MATMUL],
        communication_us=times[COMMUNICATION],
        sequential_us=times[SEQUENTIAL],
        ceiling_us=times.get(CEILING),
    )


def _row(method: Method, samples: Samples, roofs: Roofs, plan: str) -> MethodRow:
    own = samples.device_us[method.name]
    baselines = _baselines(samples) if method.gives_result else {}
    return MethodRow(
        name=method.name,
        label=method.label,
        median_us=median(own),
        p90_us=p90(own),
        host_us=samples.host_us.get(method.name),
        speedups={name: paired_ratio(theirs, own) for name, theirs in baselines.items()},
        measures=measure(median(own), roofs) if method.gives_result else None,
        plan=plan,
    )


def _baselines(samples: Samples) -> dict[str, tuple[float, ...]]:
    """What methods are compared with: the library, and the quickest of what torch ships for the operator."""
    times = samples.device_us
    by_torch = [times[name] for name in TORCH if name in times]
    fastest = {TORCH_FUSED: min(by_torch, key=median)} if by_torch else {}
    return {SEQUENTIAL: times[SEQUENTIAL], **fastest}
