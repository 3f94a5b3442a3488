"""A static heuristic for a gather's library schedule, by sizes and the machine alone, without simulation.

Each schedule has a signature: how it cuts the matmul and the transfer. The signature determines the loss of cutting
(decomposition), the slowdown of matmuls by concurrent copies (contention), and when each step's pieces arrive.
SOURCE: FiCCO, V-C and Figure 12(a), whose own rule is `paper_rule`; the simulator decides (rank.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Literal

from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.ir.schedule import Range
from overweave.ir.shards import piece_rows
from overweave.schedules.catalog.catalog import LIBRARY_ALIGNMENT
from overweave.schedules.methods.registry import METHODS
from overweave.sim.cost import library_matmul_us

SUM_BYTES = ITEMSIZE_BYTES["float32"]
FEW, MANY = 1.0, 5.0  # times the machine's threshold
THRESHOLD_MS = 1.0  # the paper compares operations with operations per second; we take those of a millisecond


class Signature(Struct, frozen=True):
    """How a schedule cuts a gather and its matmul. is_own_first: the own shard is multiplied before anything arrives.

    is_fused: one matmul for all pieces of a step. cut: the unit of a transfer: nothing is cut, a shard to one peer, or
    a piece of the shard, rows or columns, to every peer.
    """

    plan: str
    cut: Literal["whole", "shards", "rows", "columns"]
    is_own_first: bool = False
    is_fused: bool = True


SIGNATURES = (
    Signature("sequential", "whole"),
    Signature("per_shard", "shards", is_own_first=True),
    Signature("uniform_fused_1d", "rows"),
    Signature("hetero_fused_1d", "rows", is_own_first=True),
    Signature("hetero_unfused_1d", "rows", is_own_first=True, is_fused=False),
    Signature("uniform_fused_2d", "columns"),
)


class PipelineStep(Struct, frozen=True):
    """When the pieces of a step have arrived, from the first copy on, and the time of the matmul on them alone."""

    arrived_us: float
    matmul_us: float


class PipelineEstimate(Struct, frozen=True):
    """A schedule's steps as a pipeline. waits: signals that a step's stream waits for. load: of the ports while copies
    last."""

    own_us: float
    steps: tuple[PipelineStep, ...]
    waits: int
    load: float
    per_step_us: float = 0.0
    tail_us: float = 0.0


class Advice(Struct, frozen=True):
    """The plan, as the operators' `plan=` takes it, the reasons, and the estimated time of every signature."""

    plan: str
    reasons: tuple[str, ...]
    estimates_us: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return "\n".join([f"static heuristic: {self.plan}", *(f"  because {reason}" for reason in self.reasons)])


def applies_to(problem: Problem, machine: Machine) -> bool:
    """Whether the operator has the schedules of all signatures, and the machine enough GPUs with peer access. Without
    peer access, as between hosts, only one of the schedules runs."""
    has_methods = all(f"{problem.operator}.{each.plan}" in METHODS for each in SIGNATURES)
    is_cut = 1 < problem.world_size <= min(problem.m, machine.gpus) and problem.k >= problem.world_size
    reaches = machine.peer_access and len(machine.islands) == 1
    return has_methods and is_cut and reaches and problem.epilogue.products == 1


def advise(problem: Problem, machine: Machine) -> Advice:
    """Return the plan with the least estimated time, and the reasons. For problems that it `applies_to`."""
    sizes = _Sizes(problem, machine)
    estimates = {each.plan: sizes.total_us(each) for each in SIGNATURES}
    plan = min(estimates, key=estimates.__getitem__)
    return Advice(plan, tuple(_reasons(sizes, plan, estimates)), tuple(estimates.items()))


def paper_rule(problem: Problem, machine: Machine) -> str:
    """Return the plan of FiCCO's rule: columns if m < k; else by operations, which are op-to-byte times memory
    traffic."""
    if problem.m <= problem.k:
        return "uniform_fused_2d"
    threshold = max(tile.tflops for tile in machine.tiles_of("library")) * 1e9 * THRESHOLD_MS
    operations = op_to_byte(problem) * memory_traffic(problem)
    if operations < FEW * threshold:
        return "uniform_fused_1d"
    return "hetero_unfused_1d" if operations > MANY * threshold else "hetero_fused_1d"


def memory_traffic(problem: Problem) -> float:
    """Return the least bytes that a matmul reads and writes: m k + n k + m n elements (FiCCO, IV-D1)."""
    m, n, k = problem.m, problem.n, problem.k
    return float((m * k + n * k + m * n) * ITEMSIZE_BYTES[problem.dtype])


def op_to_byte(problem: Problem) -> float:
    """Return operations for each of those bytes (FiCCO, IV-C1)."""
    return 2.0 * problem.m * problem.n * problem.k / memory_traffic(problem)


class _Sizes:
    """The sizes of a problem on a machine, and the times that follow."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.ranks, self.m, self.n, self.k = problem.world_size, problem.m, problem.n, problem.k
        self.shard = -(-self.m // self.ranks)
        self.item = ITEMSIZE_BYTES[problem.dtype]
        peers = max(self.ranks - 1, 1)
        alone = min(machine.links.push.peak_gb_per_s, machine.routes.alone_gb_per_s(0, 1))
        self.shared_peak_ratio = min(
            1.0, machine.links.all_peers.peak_gb_per_s / alone / peers
        )  # of a copy beside copies to all peers
        self.alone_load = alone / machine.engines_gb_per_s

    def matmul_us(self, rows: int, k: int, is_added: bool = False) -> float:
        """Return the time of a matmul kernel in a stream."""
        us = library_matmul_us(self.machine, (rows, self.n, k), self.problem.dtype, is_added)
        return us - self.machine.latency.call.us

    def decomposition(self, by: Literal["rows", "columns"]) -> float:
        """Return the time of W matmuls of a W-th each, over that of the whole one."""
        cut = (self.shard, self.k) if by == "rows" else (self.m, -(-self.k // self.ranks))
        return self.ranks * self.matmul_us(*cut, is_added=by == "columns") / self.matmul_us(self.m, self.k)

    def total_us(self, signature: Signature) -> float:
        """Return the estimated time of a call."""
        latency = self.machine.latency
        if signature.cut == "whole":
            gathered_us = self.machine.collective_us("all_gather", self.ranks, self.m * self.k * self.item)
            return gathered_us + latency.flag.us + self.matmul_us(self.m, self.k)
        return _end_us(self.timeline(signature), latency.call.us + latency.begin.us, self.machine)

    def timeline(self, signature: Signature) -> PipelineEstimate:
        """Return the steps of a schedule."""
        own_us = self.matmul_us(self.shard, self.k) if signature.is_own_first else 0.0
        if signature.cut == "shards":
            arrived = self._arrivals([self.shard * self.k] * (self.ranks - 1), 1.0)
            steps = tuple(PipelineStep(us, own_us) for us in arrived)
            return PipelineEstimate(own_us, steps, waits=1, load=self.alone_load)
        if signature.cut == "columns":
            return self._by_columns()
        return self._by_rows(signature, own_us)

    def _by_rows(self, signature: Signature, own_us: float) -> PipelineEstimate:
        """Return the steps of a schedule that cuts shards by rows."""
        heights = [hi - lo for lo, hi in _cut(self.shard, self.ranks)]
        arrived = self._arrivals([rows * self.k for rows in heights], self.shared_peak_ratio)
        latency, peers = self.machine.latency, self.ranks - 1
        if not signature.is_fused:
            each = [peers * (self.matmul_us(rows, self.k) + latency.stream_wait.us) for rows in heights]
            return PipelineEstimate(own_us, _steps(arrived, each), waits=0, load=1.0)
        together = peers if signature.is_own_first else self.ranks
        each = [self.matmul_us(rows * together, self.k) for rows in heights]
        scattered = 2 * heights[-1] * together * self.n * self.item / self.machine.local_copies.gb_per_s / 1e3
        tail_us = scattered + latency.flag.us + latency.stream_wait.us
        return PipelineEstimate(
            own_us, _steps(arrived, each), waits=together, load=1.0, per_step_us=latency.flag.us, tail_us=tail_us
        )

    def _by_columns(self) -> PipelineEstimate:
        """Return the steps of a schedule that cuts shards by columns."""
        machine, widths = self.machine, [hi - lo for lo, hi in _cut(self.k, self.ranks)]
        arrived = self._arrivals(
            [self.shard * cols for cols in widths], self.shared_peak_ratio, machine.links.strided.factor
        )
        each = [self.matmul_us(self.m, cols, is_added=step > 0) for step, cols in enumerate(widths)]
        rounded = self.m * self.n * (SUM_BYTES + self.item) / machine.element_wise.narrow.gb_per_s / 1e3
        tail_us = rounded + machine.latency.kernel.us
        return PipelineEstimate(0.0, _steps(arrived, each), waits=self.ranks, load=1.0, tail_us=tail_us)

    def _arrivals(self, elements: Iterable[int], share: float, factor: float = 1.0) -> list[float]:
        """Return when each of consecutive copies has arrived. share: of the bandwidth of a copy alone."""
        machine = self.machine
        each = (
            max(machine.links.push.time_us(count * self.item), machine.routes.time_us(0, 1, count * self.item))
            for count in elements
        )
        return list(accumulate(us * factor / share + machine.latency.flag.us for us in each))


def _cut(size: int, pieces: int) -> list[Range]:
    """Return the pieces of rows or columns that are not empty."""
    return [piece for piece in piece_rows((0, size), pieces, LIBRARY_ALIGNMENT) if piece[0] < piece[1]]


def _steps(arrived: list[float], matmuls: list[float]) -> tuple[PipelineStep, ...]:
    return tuple(PipelineStep(*pair) for pair in zip(arrived, matmuls, strict=True))


def _end_us(line: PipelineEstimate, start_us: float, machine: Machine) -> float:
    """Return when the last step ends: each begins when its pieces have arrived and the step before has ended. Copies
    slow the matmuls beside them."""
    slowdown = 1.0 + (machine.sharing.copy_engine.factor - 1.0) * line.load
    copies_end_us = start_us + line.steps[-1].arrived_us
    now_us = _work_end_us(start_us, line.own_us, copies_end_us, slowdown)
    for step in line.steps:
        ready_us = max(now_us, start_us + step.arrived_us) + machine.latency.stream_wait.us * line.waits
        now_us = _work_end_us(ready_us, step.matmul_us, copies_end_us, slowdown) + line.per_step_us
    return now_us + line.tail_us


def _work_end_us(now_us: float, work_us: float, copies_end_us: float, slowdown: float) -> float:
    """Return the end of work that begins now and is slower until the copies end."""
    beside_us = max(0.0, min(work_us * slowdown, copies_end_us - now_us))
    return now_us + beside_us + work_us - beside_us / slowdown


def _reasons(sizes: _Sizes, plan: str, estimates: dict[str, float]) -> Iterable[str]:
    """Yield the reasons: links, m against k, op-to-byte and memory traffic, and the estimates."""
    problem, machine = sizes.problem, sizes.machine
    share, peers = sizes.alone_load, sizes.ranks - 1
    links = "one copy fills a port" if share > 0.5 else f"copies to one peer leave {1 - share:.0%} of a port idle"
    yield f"{links}: {machine.topology.kind} of {machine.name}, {peers} peers"
    rows, columns = sizes.decomposition("rows"), sizes.decomposition("columns")
    order = "m < k" if problem.m < problem.k else "m >= k"
    yield f"{order} ({problem.m} and {problem.k}): cutting rows takes {rows:.2f} of the matmul, columns {columns:.2f}"
    balance = max(tile.tflops for tile in machine.tiles_of("library")) * 1e3 / machine.hbm.gb_per_s
    intensity, traffic = op_to_byte(problem), memory_traffic(problem)
    yield f"op-to-byte {intensity:.0f}, {intensity / balance:.1f} times what keeps memory and SMs of the machine busy"
    memory_us = traffic / machine.hbm.gb_per_s / 1e3
    yield f"memory traffic {traffic / 1e9:.2f} GB, {memory_us:.0f} us of the machine's memory"
    serial = estimates["sequential"]
    others = sorted((us, name) for name, us in estimates.items() if name != plan)
    gain, (next_us, following) = serial / estimates[plan], others[0]
    yield f"estimated {estimates[plan]:.0f} us, {gain:.2f} times as fast as serial; next {following}, {next_us:.0f} us"
    yield f"the paper's rule, for a full mesh, says {paper_rule(problem, machine)}"
