"""What an eager call costs the host without overweave: torch's own calls made directly, or the parts of a replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from campaigns.host.host_cases import GATHER, REDUCE, SCATTER, Case, Sizes, sizes_of
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.fast_empty import maker
from overweave.memory.group import resolve
from overweave.runtime.library.library import all_gather_flat, reduce_scatter_flat

BURST, BURSTS, WARM, WARM_ROUNDS = 16, 15, 8, 2000
Call = Callable[[], object]
NEW_TENSOR, EVENT = "a new tensor", "an event"


def host_us(call: Call) -> float:
    """Of a call, in bursts that nobody waits for; the median burst, the slowest rank."""
    return by_turns_us(call)[0]


def by_turns_us(*calls: Call) -> list[float]:
    """Of each call, one burst of every call after the other: what slows the host for a while slows all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(BURSTS):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start_ns = time.perf_counter_ns()
            for _ in range(BURST):
                call()
            found.append((time.perf_counter_ns() - start_ns) / BURST / 1e3)
    torch.cuda.synchronize()
    return [slowest(sorted(found)[len(found) // 2]) for found in times]


def slowest(us: float) -> float:
    """The largest over ranks."""
    found = torch.tensor(us, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def warm(sizes: Sizes) -> None:
    """So that torch, NCCL and the clocks of the host have their stride, whatever is measured first. Collective."""
    calls = [_library(operator, sizes) for operator in (GATHER, SCATTER, REDUCE)]
    for _ in range(WARM_ROUNDS):
        for call in calls:
            call()
    torch.cuda.synchronize()


def parts() -> dict[str, Call]:
    """What every call is made of."""
    x, event, stream = torch.ones(512, 512, device="cuda"), torch.cuda.Event(), torch.cuda.current_stream()
    graph, make = torch.cuda.CUDAGraph(), maker(x.device)
    with torch.cuda.graph(graph):
        x.add_(1)
    return {
        NEW_TENSOR: lambda: x.new_empty((512, 512)),
        "a new tensor as ours are made": lambda: make((512, 512), torch.float32),
        "a small kernel by torch": lambda: x.add_(1),
        "a graph of one kernel": graph.replay,
        EVENT: lambda: event.record(stream),
    }


def host_and_bare_us(case: Case, sizes: Sizes, call: Call, part: dict[str, Call]) -> tuple[float, float | None]:
    """Of a call, and by turns with it what torch's own calls cost that do what the case does; of a call that is a
    graph: its launch, its new tensors and an event. None where nothing of the kind is known. Collective.

    part: see `parts`."""
    direct = _direct(case, sizes_of(case, sizes))
    if direct is not None:
        for _ in range(WARM):
            direct()
        call_us, direct_us = by_turns_us(call, direct)
        return call_us, direct_us
    in_graph_us, results = _inside_graphs(call)
    call_us, new_tensor_us, event_us = by_turns_us(call, part[NEW_TENSOR], part[EVENT])
    return call_us, in_graph_us + results * new_tensor_us + event_us if in_graph_us else None


def _direct(case: Case, sizes: Sizes) -> Call | None:
    if case.beside:
        return None
    if case.plan == "sequential":
        return _library(case.operator, sizes)
    return _by_symmetric_memory(case.plan, sizes) if case.plan in ("torch.one_shot", "torch.two_shot") else None


def _library(operator: str, sizes: Sizes) -> Call:
    """A matmul, and NCCL's collective before or behind it."""
    rows = sizes.m // sizes.ranks
    x = torch.randn(rows if operator == GATHER else sizes.m, sizes.k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(sizes.n, sizes.k, device="cuda", dtype=torch.bfloat16).t()

    def gather() -> object:
        whole = x.new_empty(sizes.m, sizes.k)
        all_gather_flat(whole, x)
        return torch.mm(whole, w)

    def scatter() -> object:
        y = x.new_empty(rows, sizes.n)
        reduce_scatter_flat(y, torch.mm(x, w))
        return y

    def reduce() -> object:
        y = torch.mm(x, w)
        dist.all_reduce(y)
        return y

    return {GATHER: gather, SCATTER: scatter, REDUCE: reduce}[operator]


def _by_symmetric_memory(plan: str, sizes: Sizes) -> Call:
    """A matmul into symmetric memory, and torch's all-reduce of that. Collective."""
    group, bf16 = resolve(None), torch.bfloat16
    x, w = (torch.randn(rows, sizes.k, device="cuda", dtype=bf16) for rows in (sizes.m, sizes.n))
    w, heap = w.t(), CudaHeap(group, x.device, sizes.m * sizes.n * bf16.itemsize)
    partial = heap.view(0, (sizes.m, sizes.n), bf16)
    shot: Any = getattr(torch.ops.symm_mem, f"{plan.removeprefix('torch.')}_all_reduce_out")

    def call() -> object:
        y = x.new_empty(sizes.m, sizes.n)
        torch.mm(x, w, out=partial)
        shot(partial, "sum", group.name, y)
        return y, heap

    return call


def _inside_graphs(call: Call) -> tuple[float, int]:
    """Of a call, the time that launches of graphs take, and how many tensors it gives back."""
    spent_ns, launch = 0, torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal spent_ns
        start_ns = time.perf_counter_ns()
        launch(graph)
        spent_ns += time.perf_counter_ns() - start_ns

    with patch.object(torch.cuda.CUDAGraph, "replay", timed):
        results = call()
        torch.cuda.synchronize()
        spent_ns = 0
        host_us(call)
    spent_us = slowest(spent_ns / (BURST * BURSTS) / 1e3)
    return spent_us, len(results) if isinstance(results, tuple) else 1
