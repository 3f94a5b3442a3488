"""The comparison of the ways to compute a transformer block, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from msgspec.structs import replace

from overweave.block.cases import BlockCase
from overweave.block.ways import WAYS, BlockSetup
from overweave.compat.torch_names import reset
from overweave.memory.group import Group
from overweave.tuner.measure.bench import BenchRequest, BenchRun, CaseRows, device_count, new_run, rank_device, row_of
from overweave.tuner.measure.replay import is_replayed, with_graph_warmup
from overweave.tuner.measure.trial import TimedTrial
from overweave.tuner.space.shapes import DTYPES


def block_runs(
    cases: tuple[BlockCase, ...],
    request: BenchRequest,
    group: Group,
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[BenchRun]:
    """Compare the ways, and yield the run so far after each case. Collective. request: device and dtype. on_progress:
    called with the case and the fraction of it that is done."""
    so_far = new_run(request, group)
    for case in cases:
        on_round = partial(on_progress, case.name) if on_progress is not None else None
        so_far = replace(so_far, cases=(*so_far.cases, _rows_of(case, request, group, on_round)))
        yield so_far


def _rows_of(
    case: BlockCase, request: BenchRequest, group: Group, on_round: Callable[[float], None] | None = None
) -> CaseRows:
    """Time all ways on one case; each result must agree with the first way's. Decoding is timed as captured graphs, if
    the backend is NCCL."""
    reset()
    device = rank_device(request.device)
    blocks = BlockSetup(case, group, (device, getattr(torch, DTYPES[request.dtype])))
    calls = {way.name: blocks.timed_call(way) for way in WAYS}
    is_shared = group.world_size > device_count()  # then the backend is gloo, which cannot be captured
    as_graphs = case.work == "decoding" and is_replayed(device, case.tokens) and not is_shared
    trial = TimedTrial(blocks, with_graph_warmup(request.effort, device), as_graphs=as_graphs)
    samples = trial.times({name: call for name, (call, _) in calls.items()}, on_round=on_round)
    rows = tuple(
        row_of((way.name, way.label), samples, "" if way.graph is None else str(calls[way.name][1]))
        for way in WAYS
        if way.name not in trial.left_out and WAYS[0].name not in trial.left_out  # the baseline of the others
    )
    return CaseRows(case=case.matmul, methods=rows, left_out=trial.left_out, is_replayed=as_graphs)
