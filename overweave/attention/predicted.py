"""Predicted times of attention over a shared sequence: what pieces take by the pairs that they see, and what each plan.

Every kernel is one tile of its schedule, and has all SMs. A time is the slowest rank's.
"""

from __future__ import annotations

from functools import cached_property

from overweave.attention.cases import AttentionCase
from overweave.attention.schedules import schedule_for
from overweave.attention.sequence import Piece
from overweave.hardware.machine import Machine, Pass
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.schedule import Apply
from overweave.schedules.records.attention import ATTENTION, HEADS, OPERATORS, PER_SHARD, PLANS, SEQUENTIAL
from overweave.sim.nccl import collective_us
from overweave.tuner.measure.predicted_plans import Predicted, choice_of, plans_us

DTYPE_BYTES, SUM_BYTES = ITEMSIZE_BYTES["bfloat16"], ITEMSIZE_BYTES["float32"]
OPERATIONS: dict[Pass, int] = {"forward": 4, "backward": 10}  # a column, for each pair of a query and a key


def predicted(case: AttentionCase, ranks: int, machine: Machine) -> Predicted[AttentionCase]:
    """Return what attention, and of a trained case its gradients, take on so many ranks of a machine; without heads
    that ranks do not divide. Raises InputError."""
    divides = all(each % ranks == 0 for each in (case.heads, case.groups))
    plans = dict.fromkeys((plan for plan in PLANS if plan != HEADS or divides), 0.0)
    alone_us, link_us, moved = 0.0, 0.0, 2 * case.tokens * case.columns
    for operator in OPERATORS[: 1 + case.is_trained]:
        costs = {plan: AttentionCosts(case, ranks, machine, f"{operator}.{plan}") for plan in plans}
        schedules = ((plan, schedule_for(f"{operator}.{plan}", case, ranks), costs[plan]) for plan in plans)
        found = plans_us(schedules, machine)
        plans = {plan: us + found[plan] for plan, us in plans.items() if plan in found}
        alone_us += max(costs[SEQUENTIAL].rank_us(rank) for rank in range(ranks))
        link_us += collective_us(machine, "all_gather", tuple(range(ranks)), moved * DTYPE_BYTES)
    if case.is_trained:
        link_us += collective_us(machine, "reduce_scatter", tuple(range(ranks)), moved * SUM_BYTES)
    return Predicted(case, alone_us, link_us, plans, choice_of(plans, SEQUENTIAL))


def whole_us(case: AttentionCase, machine: Machine, direction: Pass = "forward") -> float:
    """Return what one GPU takes for the whole sequence."""
    costs = AttentionCosts(case, 1, machine, f"{OPERATORS[direction == 'backward']}.{SEQUENTIAL}")
    return costs.attend_us(costs.whole, case.heads)


class AttentionCosts:
    """The time of each kernel of a schedule on one rank of a group, by what it computes."""

    def __init__(self, case: AttentionCase, ranks: int, machine: Machine, name: str) -> None:
        operator, plan = ATTENTION.operator_and_plan(name)
        self.case, self.ranks, self.machine = case, ranks, machine
        self.plan, self.is_backward = plan, operator != OPERATORS[0]
        self.sequence = case.sequence(ranks)

    def __call__(self, operation: Apply) -> float:
        """Return microseconds of an operation of the schedule."""
        what, _, source = operation.function.partition("_")
        if what == "attend":
            return self.heads_us if self.plan == HEADS else self.rank_us(operation.rank)
        if what == "piece":
            own_us = self.piece_us(operation.rank, int(source))
            return own_us + (self._add_us(operation.rank, int(source)) if self.plan == PER_SHARD else 0.0)
        if what == "add":
            return self._add_us(operation.rank, int(source))
        return self._end_us(operation.rank) if what == "finish" else 0.0

    @cached_property
    def heads_us(self) -> float:
        """Return the time of a rank's heads of all rows, and of laying them out for the library and back."""
        case = self.case
        attended_us = self.attend_us(self.whole, max(1, case.heads // self.ranks))
        laid_out = 2 * self.sequence.own(0) * (self._columns + case.columns) * DTYPE_BYTES  # q, k, v, out; or gradients
        return attended_us + self._moved_us(4 * laid_out) + 8 * self.machine.latency.kernel.us

    def rank_us(self, rank: int) -> float:
        """Return the time of all that a rank computes."""
        pieces = sum(self.piece_us(rank, source) for source in range(self.ranks))
        return pieces + sum(self._add_us(rank, source) for source in range(self.ranks)) + self._end_us(rank)

    def piece_us(self, rank: int, source: int) -> float:
        """Return the time of what a rank computes of a shard: its kernel, and its merge with what came before."""
        piece = self.sequence.piece(rank, source)
        if piece is None:
            return 0.0
        columns, queries = self._columns, piece.queries.stop - piece.queries.start
        latency_us = self.machine.latency.kernel.us
        if self.is_backward:  # to dq
            beside_us = self._moved_us(queries * columns * (DTYPE_BYTES + 2 * SUM_BYTES)) + latency_us
        elif source == rank:
            beside_us = 0.0
        else:  # what came before, this part, and the sum of both
            beside_us = self._moved_us(queries * columns * (DTYPE_BYTES + 2 * SUM_BYTES)) + latency_us
        return self.attend_us(piece, self.case.heads) + beside_us

    def _add_us(self, rank: int, source: int) -> float:
        """Of gradients: a piece's part of those of keys is widened, and added to what came of ranks before."""
        if not self.is_backward or self.sequence.piece(rank, source) is None:
            return 0.0
        is_added = source != rank and self.plan not in (SEQUENTIAL, PER_SHARD)
        moved = 2 * self.sequence.own(source) * self.case.columns * (DTYPE_BYTES + (4 if is_added else 1) * SUM_BYTES)
        return self._moved_us(moved) + 2 * self.machine.latency.kernel.us

    @property
    def whole(self) -> Piece:
        """Return all queries and all keys."""
        rows = slice(0, self.case.tokens)
        return Piece(rows, rows, self.case.is_causal, None if self.case.window is None else self.case.window - 1)

    def attend_us(self, piece: Piece, heads: int) -> float:
        """Return the time of torch's kernel, or kernels, alone."""
        direction: Pass = "backward" if self.is_backward else "forward"
        rate = self.machine.attention_rate(direction, self.case.head_dim)
        operations = OPERATIONS[direction] * self.case.batch * heads * self.case.head_dim * piece.pairs
        return self.machine.latency.kernel.us + rate.overhead_us + operations / rate.tflops / 1e6

    def _end_us(self, rank: int) -> float:
        """Of gradients: sums are rounded; by `per_shard` an owner adds what every rank has."""
        if not self.is_backward:
            return 0.0
        givers = self.ranks if self.plan == PER_SHARD else 0
        kept = (self._columns + 2 * self.case.columns) * (SUM_BYTES + DTYPE_BYTES)
        return self._moved_us(self.sequence.own(rank) * (kept + 2 * self.case.columns * 3 * SUM_BYTES * givers))

    @property
    def _columns(self) -> int:
        """Of queries, as rows."""
        return self.case.batch * self.case.heads * self.case.head_dim

    def _moved_us(self, moved: int) -> float:
        return moved / self.machine.hbm.gb_per_s / 1e3
