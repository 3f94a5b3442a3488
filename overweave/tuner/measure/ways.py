"""Ways to compute a case that is no operator's, a layer of experts or attention, timed beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from msgspec.structs import replace

from overweave.memory.group import Group
from overweave.tuner.measure.baselines import COMMUNICATION, MATMUL, SEQUENTIAL
from overweave.tuner.measure.bench import (
    BenchRequest,
    BenchRun,
    CaseRows,
    Roofs,
    device_count,
    measure,
    new_run,
    row_of,
)
from overweave.tuner.measure.timer import median, with_graph_warmup
from overweave.tuner.measure.trial import CallResult, TimedTrial
from overweave.tuner.space.shapes import ShapeCase


class ComparedCase(Protocol):
    """What is computed. matmul: what stands for it in result files. group: over which a mean is formed."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def matmul(self) -> ShapeCase: ...


class Setup(Protocol):
    """What all ways of a case compute with, on this rank."""

    @property
    def group(self) -> Group: ...
    @property
    def device(self) -> torch.device: ...


class Way(NamedTuple):
    """A row of the comparison: a call of a setup and a sample. reads_counts: the host does, so that no graph holds it.
    plan: of ours."""

    name: str
    label: str
    call: Callable[[Any, int], CallResult]
    reads_counts: bool = False
    plan: str = ""


AnyCase = TypeVar("AnyCase", bound=ComparedCase)


class Comparison(NamedTuple, Generic[AnyCase]):
    """What is compared: a case's setup on this rank, and its ways, of which two are the roofs and one is the library's,
    with whose result each must agree. apart: names of ways that round otherwise, and are not compared; where the
    library's is one, the others must agree with the first of ours."""

    setup_of: Callable[[AnyCase], Setup]
    ways_of: Callable[[AnyCase], Sequence[Way]]
    apart: tuple[str, ...] = ()

    def runs(
        self,
        cases: Sequence[AnyCase],
        request: BenchRequest,
        group: Group,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Iterator[BenchRun]:
        """Compare the ways, and yield the run so far after each case. Collective. on_progress: called with the case and
        the fraction of it that is done."""
        so_far = new_run(request, group)
        for case in cases:
            on_round = partial(on_progress, case.name) if on_progress is not None else None
            so_far = replace(so_far, cases=(*so_far.cases, self._rows_of(case, request, on_round)))
            if request.device == "cuda":
                torch.cuda.empty_cache()  # what one case computes with leaves no room for the next one's
            yield so_far

    def _rows_of(self, case: AnyCase, request: BenchRequest, on_round: Callable[[float], None] | None) -> CaseRows:
        """Time all ways on one case. Each is a captured graph, if the backend is NCCL and no host reads counts."""
        setup, ways = self.setup_of(case), self.ways_of(case)
        device, as_graphs = setup.device, is_captured(setup.group, setup.device)
        (library,) = (way for way in ways if way.name == SEQUENTIAL)
        right = next(way for way in ways if way.plan) if library.name in self.apart else library
        trial = TimedTrial(setup, with_graph_warmup(request.effort, device), right.call(setup, 0), as_graphs)
        calls = {way.name: partial(way.call, setup) for way in ways}
        eager = [way.name for way in ways if way.reads_counts]
        samples = trial.times(calls, (MATMUL, COMMUNICATION, *self.apart), on_round, eager)
        times = {name: median(values) for name, values in samples.device_us.items()}
        roofs = Roofs(
            matmul_us=times[MATMUL],
            communication_us=times[COMMUNICATION],
            sequential_us=times[SEQUENTIAL],
            ceiling_us=max(times[MATMUL], times[COMMUNICATION]),
        )
        rows = []
        for way in ways:
            if way.name not in trial.left_out:
                row = row_of((way.name, way.label), samples, way.plan)
                is_roof = way.name in (MATMUL, COMMUNICATION)
                rows.append(
                    replace(row, speedups={}) if is_roof else replace(row, measures=measure(row.median_us, roofs))
                )
        return CaseRows(
            case=case.matmul, methods=tuple(rows), left_out=trial.left_out, is_replayed=as_graphs, group=case.group
        )


def is_captured(group: Group, device: torch.device) -> bool:
    """Whether calls are captured: ranks that share a GPU have gloo, which no graph holds."""
    return device.type == "cuda" and group.world_size <= device_count()
