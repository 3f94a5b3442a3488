"""From regions to addresses: what a copy queue does is carried out here, word by word, and read back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from overweave.errors import ScheduleError
from overweave.ir.plan import COPY_ENGINE, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Put, Region, Schedule
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    CopyStep,
    MemoryRef,
    SlotAddresses,
    StreamStep,
    WaitStep,
    WriteStep,
    addend_addresses,
    copy_steps,
    copy_targets,
    reduction_operands,
)
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import PUSHES
from tests.ir.two_ranks import RANKS, altered, exchange, put, sums, total, whole

BASES = (1 << 20, 1 << 40)


def addresses_of(schedule: Schedule) -> SlotAddresses:
    return SlotAddresses(schedule, "float32", lay_out(schedule, "float32"), BASES)


def steps_of(schedule: Schedule) -> tuple[StreamStep, ...]:
    operations = [operation for operation in schedule.of_rank(0) if operation.queue == "copies"]
    return copy_steps(addresses_of(schedule), operations)


def test_a_push_waits_for_its_own_rank_copies_and_tells_the_peer():
    schedule = sums()
    layout, (own, peer) = lay_out(schedule, "float32"), BASES
    assert steps_of(schedule) == (
        WaitStep(own + layout.signal_offset("computed", 0), 3),
        CopyStep(
            MemoryRef(None, own + layout.buffers["part"], 16), MemoryRef(None, peer + layout.buffers["slot"], 16), 16, 2
        ),
        WriteStep(peer + layout.signal_offset("arrived", 0), 1),
    )


def test_a_callers_tensor_is_named_and_a_rectangle_starts_inside_it():
    corner = {"sources": (Region("x", 0, (1, 2), (2, 4)),), "destinations": (Region("slot", 1, (0, 1), (1, 3)),)}
    (copy, _) = steps_of(exchange(put(0, **corner)))
    offset = lay_out(exchange(), "float32").buffers["slot"]
    assert copy == CopyStep(MemoryRef("x", 16 + 8, 16), MemoryRef(None, BASES[1] + offset + 4, 16), 8, 1)


def test_an_empty_chunk_still_signals():
    nothing = {"sources": (whole("x", 0, (2, 2)),), "destinations": (whole("slot", 1, (2, 2)),)}
    assert [type(step) for step in steps_of(exchange(put(0, **nothing)))] == [WriteStep]


class Memory:
    """Words of 4 bytes by address: every rank's slot, and tensors of the caller."""

    def __init__(self, tensors: dict[str, int]) -> None:
        self.tensors = tensors
        self.words: dict[int, object] = {}

    def run(self, steps: tuple[StreamStep, ...]) -> None:
        for step in steps:
            if isinstance(step, WriteStep):
                self.words[step.address] = step.value
            elif isinstance(step, CopyStep):
                for row in range(step.rows):
                    source, target = (
                        self._start(place) + row * place.pitch_bytes for place in (step.source, step.target)
                    )
                    for at in range(0, step.row_bytes, 4):
                        self.words[target + at] = self.words[source + at]

    def _start(self, place: MemoryRef) -> int:
        return place.address + (self.tensors[place.tensor] if place.tensor else 0)


def carry_out(plan: Plan, bases: tuple[int, ...]) -> Memory:
    """All pushes of an all-gather; `x` of a rank lies at 2^50, rank by rank, and word (r, c) of it holds both."""
    schedule, problem = plan.schedule, plan.problem
    layout, memory = lay_out(schedule, "float32"), Memory({})
    queues = [queue.name for queue in schedule.queues if plan.realization.engine_of(queue.name) == COPY_ENGINE]
    for given in schedule.given:
        if given.region.buffer == "x":
            for row in range(given.region.shape[0]):
                for col in range(problem.k):
                    at = (given.region.rank << 50) + 4 * (row * problem.k + col)
                    memory.words[at] = (given.row + row, col)
    for rank in range(problem.world_size):
        memory.tensors = {"x": rank << 50}
        for queue in queues:
            operations = [operation for operation in schedule.of_rank(rank) if operation.queue == queue]
            memory.run(copy_steps(SlotAddresses(schedule, "float32", layout, bases), operations))
    return memory


@pytest.mark.parametrize("options", [{"pieces": 1}, {"pieces": 3, "order": "all_peers"}])
@pytest.mark.parametrize("m", [1, 37, 48])
def test_pushes_bring_every_row_to_its_place_and_set_every_flag(m: int, options: dict[str, str | int]):
    problem = Problem(operator="all_gather_matmul", m=m, n=8, k=8, world_size=3, dtype="float32")
    plan = build("all_gather_matmul.push", problem, {"block_m": 16, **options})
    layout, bases = lay_out(plan.schedule, "float32"), tuple(rank + 1 << 32 for rank in range(3))
    memory = carry_out(plan, bases)
    own = {region.rank: region.shape[0] for region in (g.region for g in plan.schedule.given) if region.buffer == "x"}
    size = -(-m // 3)
    for rank, base in enumerate(bases):
        for row in range(m):
            words = [memory.words.get(base + layout.buffers["gathered"] + 4 * (8 * row + col)) for col in range(8)]
            is_own = row // size == rank
            assert words == ([None] * 8 if is_own else [(row, col) for col in range(8)])
        waits = [wait for operation in plan.schedule.of_rank(rank) for wait in operation.waits]
        flags = [base + layout.signal_offset(wait.pad, at) for wait in waits for at in range(*wait.signals)]
        assert bool(flags) == (m > own.get(rank, 0))
        assert all(memory.words[flag] == 1 for flag in flags)
    assert sum(own.values()) == m


def test_a_kernel_s_pushes_are_told_their_peers_buffer_and_signals():
    problem = Problem(operator="all_gather_matmul", m=37, n=8, k=8, world_size=3, dtype="float32")
    plan = build("all_gather_matmul.push", problem, {"block_m": 16, "mover": "copy_kernel"})
    layout, bases = lay_out(plan.schedule, "float32"), tuple(rank + 1 << 32 for rank in range(3))
    targets = copy_targets(SlotAddresses(plan.schedule, "float32", layout, bases), 1, PUSHES)
    moves = [operation for operation in plan.schedule.of_rank(1) if operation.queue == PUSHES]
    gathered = layout.buffers["gathered"]
    assert targets == [
        [bases[move.peer] + gathered, bases[move.peer]] if isinstance(move, Put) else [0, 0] for move in moves
    ]
    assert {target for target, _ in targets} >= {bases[0] + gathered, bases[2] + gathered}


def test_a_kernel_cannot_push_into_a_callers_tensor():
    into_x = exchange(put(0, destinations=(whole("x", 1),)))
    with pytest.raises(ScheduleError) as caught:
        copy_targets(addresses_of(into_x), 0, "copies")
    assert "workspace" in str(caught.value)


def test_a_sum_reads_its_operands_in_order_and_writes_the_callers_tensor():
    schedule = sums()
    addresses, layout = addresses_of(schedule), lay_out(schedule, "float32")
    for rank in RANKS:
        own = [BASES[rank] + layout.buffers[name] for name in (("slot", "part") if rank else ("part", "slot"))]
        assert reduction_operands(addresses, rank, "main") == [[*own, 0, 0]]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (altered(sums(), total_0=total(0, operands=(whole("part", 0), whole("x", 0)))), "caller's tensor"),
    ],
)
def test_sums_that_one_kernel_cannot_do(changed: Schedule, found: str):
    with pytest.raises(ScheduleError) as caught:
        reduction_operands(addresses_of(changed), 0, "main")
    assert found in str(caught.value)


def test_a_sum_of_fewer_operands_has_none_in_their_place():
    schedule = sums(operations=(total(0), total(0, name="again", operands=(whole("part", 0),))))
    first, second = reduction_operands(addresses_of(schedule), 0, "main")
    assert second == [first[0], 0, 0, 0]


def test_pieces_are_summed_behind_each_other():
    problem = Problem(operator="matmul_reduce_scatter", m=96, n=16, k=8, world_size=2, dtype="float32")
    plan = build("matmul_reduce_scatter.scatter", problem, {"pieces": 3, "block_m": 16})
    rows = reduction_operands(addresses_of(plan.schedule), 1, "sums")
    slot, own = zip(*(row[:2] for row in rows), strict=True)
    for places in (slot, own):
        assert [b - a for a, b in pairwise(places)] == [16 * 16 * 4] * 2
    assert [row[2] for row in rows] == [0] * 3


def test_an_addend_is_found_by_the_rows_of_the_output():
    """Beside row 32 of `y` lies row 32 + of the slot, so beside row 0 lies what is that much further up."""
    problem = Problem(operator="matmul_reduce_scatter", m=100, n=40, k=16, world_size=2, dtype="bfloat16")
    options = {"sums": "epilogue", "pieces": 2, "block_m": 16, "block_n": 16}
    schedule = build("matmul_reduce_scatter.scatter", problem, options).schedule
    layout = lay_out(schedule, "bfloat16")
    addresses = SlotAddresses(schedule, "bfloat16", layout, BASES)
    computes = [op for op in schedule.of_rank(1) if isinstance(op, Compute)]
    for compute, row in zip(computes, addend_addresses(addresses, 1, "tiles"), strict=True):
        start = BASES[1] + layout.buffers["slots"]
        assert row == [start if compute.addends else 0]  # rank 0's slot is the first, its row 0 the shard's
    tops = [compute.out[0].rows[0] for compute in computes if compute.addends]
    assert tops == [0, 32]
