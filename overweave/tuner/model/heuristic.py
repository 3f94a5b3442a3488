"""Which library schedule a gather takes, told from its sizes and the machine alone; nothing is simulated.

Each schedule has a signature: how it cuts the matmul and the transfer. From the signature follow what cutting loses
(decomposition), what copies cost matmuls beside them (contention), and when each step's pieces can be there.
SOURCE: FiCCO, V-C and Figure 12(a), whose own rule is `paper_rule`; the simulator keeps the last word (rank.py).
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
THRESHOLD_MS = 1.0  # the paper gives operations against operations per second, and no time: a millisecond of them


class Signature(Struct, frozen=True):
    """How a schedule cuts a gather and its matmul. is_own_first: the own shard is multiplied before anything arrives.

    is_fused: one matmul for all that a step brings. cut: what is sent at once: nothing is cut, a shard to one peer, or
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
    """When the pieces of a step are there, from the first copy on, and the matmul on them alone."""

    arrived_us: float
    matmul_us: float


class PipelineEstimate(Struct, frozen=True):
    """A schedule as its steps. waits: signals that a step's stream looks at. load: of the ports while copies last."""

    own_us: float
    steps: tuple[PipelineStep, ...]
    waits: int
    load: float
    per_step_us: float = 0.0
    tail_us: float = 0.0


class Advice(Struct, frozen=True):
    """The plan, as the operators' `plan=` takes it, why, and what every signature is estimated to take."""

    plan: str
    reasons: tuple[str, ...]
    estimates_us: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return "\n".join([f"static heuristic: {self.plan}", *(f"  because {reason}" for reason in self.reasons)])


def serves(problem: Problem, machine: Machine) -> bool:
    """Whether the operator has the schedules of the signatures, and the machine so many GPUs, which reach each other:
    without peer access only one of the schedules runs."""
    known = all(f"{problem.operator}.{each.plan}" in METHODS for each in SIGNATURES)
    is_cut = 1 < problem.world_size <= min(problem.m, machine.gpus) and problem.k >= problem.world_size
    return known and is_cut and machine.peer_access and problem.epilogue.products == 1


def advise(problem: Problem, machine: Machine) -> Advice:
    """The plan whose steps are estimated to end first, and the path to it. For a problem that it `serves`."""
    sizes = _Sizes(problem, machine)
    estimates = {each.plan: sizes.total_us(each) for each in SIGNATURES}
    plan = min(estimates, key=estimates.__getitem__)
    return Advice(plan, tuple(_reasons(sizes, plan, estimates)), tuple(estimates.items()))


def paper_rule(problem: Problem, machine: Machine) -> str:
    """FiCCO's rule: columns where m < k; else by operations, which are op-to-byte times memory traffic."""
    if problem.m <= problem.k:
        return "uniform_fused_2d"
    threshold = max(tile.tflops for tile in machine.tiles_of("library")) * 1e9 * THRESHOLD_MS
    operations = op_to_byte(problem) * memory_traffic(problem)
    if operations < FEW * threshold:
        return "uniform_fused_1d"
    return "hetero_unfused_1d" if operations > MANY * threshold else "hetero_fused_1d"


def memory_traffic(problem: Problem) -> float:
    """Bytes that a matmul reads and writes at least: m k + n k + m n elements (FiCCO, IV-D1)."""
    m, n, k = problem.m, problem.n, problem.k
    return float((m * k + n * k + m * n) * ITEMSIZE_BYTES[problem.dtype])


def op_to_byte(problem: Problem) -> float:
    """Operations for each of those bytes (FiCCO, IV-C1)."""
    return 2.0 * problem.m * problem.n * problem.k / memory_traffic(problem)


class _Sizes:
    """What a machine makes of a problem."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.ranks, self.m, self.n, self.k = problem.world_size, problem.m, problem.n, problem.k
        self.shard = -(-self.m // self.ranks)
        self.item = ITEMSIZE_BYTES[problem.dtype]
        peers = max(self.ranks - 1, 1)
        alone = min(machine.links.push.peak_gb_per_s, machine.routes.alone_gb_per_s(0, 1))
        self.crowd = min(1.0, machine.links.all_peers.peak_gb_per_s / alone / peers)  # of a copy among all peers'
        self.alone_load = alone / machine.engines_gb_per_s

    def matmul_us(self, rows: int, k: int, is_added: bool = False) -> float:
        """Of a kernel in a stream."""
        us = library_matmul_us(self.machine, (rows, self.n, k), self.problem.dtype, is_added)
        return us - self.machine.latency.call.us

    def decomposition(self, by: Literal["rows", "columns"]) -> float:
        """What W matmuls of a W-th each take, over the whole one."""
        cut = (self.shard, self.k) if by == "rows" else (self.m, -(-self.k // self.ranks))
        return self.ranks * self.matmul_us(*cut, is_added=by == "columns") / self.matmul_us(self.m, self.k)

    def total_us(self, signature: Signature) -> float:
        """Estimate of a call."""
        latency = self.machine.latency
        if signature.cut == "whole":
            gathered_us = self.machine.collective_us("all_gather", self.ranks, self.m * self.k * self.item)
            return gathered_us + latency.flag.us + self.matmul_us(self.m, self.k)
        return _end_us(self.line(signature), latency.call.us + latency.begin.us, self.machine)

    def line(self, signature: Signature) -> PipelineEstimate:
        """The steps of a schedule."""
        own_us = self.matmul_us(self.shard, self.k) if signature.is_own_first else 0.0
        if signature.cut == "shards":
            arrived = self._arrivals([self.shard * self.k] * (self.ranks - 1), 1.0)
            steps = tuple(PipelineStep(us, own_us) for us in arrived)
            return PipelineEstimate(own_us, steps, waits=1, load=self.alone_load)
        if signature.cut == "columns":
            return self._by_columns()
        return self._by_rows(signature, own_us)

    def _by_rows(self, signature: Signature, own_us: float) -> PipelineEstimate:
        heights = [hi - lo for lo, hi in _cut(self.shard, self.ranks)]
        arrived = self._arrivals([rows * self.k for rows in heights], self.crowd)
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
        machine, widths = self.machine, [hi - lo for lo, hi in _cut(self.k, self.ranks)]
        arrived = self._arrivals([self.shard * cols for cols in widths], self.crowd, machine.links.strided.factor)
        each = [self.matmul_us(self.m, cols, is_added=step > 0) for step, cols in enumerate(widths)]
        rounded = self.m * self.n * (SUM_BYTES + self.item) / machine.element_wise.narrow.gb_per_s / 1e3
        tail_us = rounded + machine.latency.kernel.us
        return PipelineEstimate(0.0, _steps(arrived, each), waits=self.ranks, load=1.0, tail_us=tail_us)

    def _arrivals(self, elements: Iterable[int], share: float, factor: float = 1.0) -> list[float]:
        """When copies that follow each other have arrived, each with a share of what it reaches alone."""
        machine = self.machine
        each = (
            max(machine.links.push.time_us(count * self.item), machine.routes.time_us(0, 1, count * self.item))
            for count in elements
        )
        return list(accumulate(us * factor / share + machine.latency.flag.us for us in each))


def _cut(size: int, pieces: int) -> list[Range]:
    """The pieces of rows or columns that are not empty."""
    return [piece for piece in piece_rows((0, size), pieces, LIBRARY_ALIGNMENT) if piece[0] < piece[1]]


def _steps(arrived: list[float], matmuls: list[float]) -> tuple[PipelineStep, ...]:
    return tuple(PipelineStep(*pair) for pair in zip(arrived, matmuls, strict=True))


def _end_us(line: PipelineEstimate, begun_us: float, machine: Machine) -> float:
    """Each step begins when its pieces are there and the step before has ended; copies slow the matmuls beside them."""
    slower = 1.0 + (machine.sharing.copy_engine.factor - 1.0) * line.load
    copied_us = begun_us + line.steps[-1].arrived_us
    now_us = _worked(begun_us, line.own_us, copied_us, slower)
    for step in line.steps:
        ready_us = max(now_us, begun_us + step.arrived_us) + machine.latency.stream_wait.us * line.waits
        now_us = _worked(ready_us, step.matmul_us, copied_us, slower) + line.per_step_us
    return now_us + line.tail_us


def _worked(now_us: float, work_us: float, copied_us: float, slower: float) -> float:
    """The end of work that begins now and is slower as long as copies last."""
    beside_us = max(0.0, min(work_us * slower, copied_us - now_us))
    return now_us + beside_us + work_us - beside_us / slower


def _reasons(sizes: _Sizes, plan: str, estimates: dict[str, float]) -> Iterable[str]:
    """The path: links, m against k, op-to-byte and memory traffic, and what is estimated."""
    problem, machine = sizes.problem, sizes.machine
    share, peers = sizes.alone_load, sizes.ranks - 1
    links = "one copy fills a port" if share > 0.5 else f"copies to one peer leave {1 - share:.0%} of a port idle"
    yield f"{links}: {machine.topology.kind} of {machine.name}, {peers} peers"
    rows, columns = sizes.decomposition("rows"), sizes.decomposition("columns")
    order = "m < k" if problem.m < problem.k else "m >= k"
    yield f"{order} ({problem.m} and {problem.k}): cutting rows takes {rows:.2f} of the matmul, columns {columns:.2f}"
    balance = max(tile.tflops for tile in machine.tiles_of("library")) * 1e3 / machine.hbm.gb_per_s
    intensity, moved = op_to_byte(problem), memory_traffic(problem)
    yield f"op-to-byte {intensity:.0f}, {intensity / balance:.1f} times what keeps memory and SMs of the machine busy"
    yield f"memory traffic {moved / 1e9:.2f} GB, {moved / machine.hbm.gb_per_s / 1e3:.0f} us of the machine's memory"
    serial = estimates["sequential"]
    others = sorted((us, name) for name, us in estimates.items() if name != plan)
    gain, (next_us, following) = serial / estimates[plan], others[0]
    yield f"estimated {estimates[plan]:.0f} us, {gain:.2f} times as fast as serial; next {following}, {next_us:.0f} us"
    yield f"the paper's rule, for a full mesh, says {paper_rule(problem, machine)}"
