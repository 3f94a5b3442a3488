"""Buffers whose blocks are permuted: what is proven of them, what is refused, and that their form round-trips."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.blocks import Blocks, ContiguousRun, memory_image, memory_runs, permutation_obstacle
from overweave.ir.plan import COPY_ENGINE, EngineAssignment, Plan
from overweave.ir.schedule import Buffer, Collective, Put, Region, Schedule
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.sim.simulate import total_us
from tests.clock import slowness
from tests.ir.wave_groups import wave_groups


def small(world_size: int = 2) -> Plan:
    return wave_groups(world_size, (40, 30, 24 * world_size), (8, 8), 5, 3)


def with_places(schedule: Schedule, places: tuple[int, ...]) -> Schedule:
    buffers = tuple(
        replace(buffer, blocks=replace(buffer.blocks, places=places)) if buffer.blocks else buffer
        for buffer in schedule.buffers
    )
    return replace(schedule, buffers=buffers)


def places_of(schedule: Schedule) -> tuple[int, ...]:
    blocks = schedule.buffer("staged").blocks
    assert blocks is not None
    return blocks.places


def test_a_block_that_is_smaller_than_its_cell_leaves_padding():
    blocks = Blocks(2, 3, (3, 2, 1, 0))  # of a matrix [3, 5]
    assert blocks.stack == (8, 3)
    assert memory_runs(blocks, (3, 5), ((0, 3), (0, 5))) == (
        ContiguousRun(0, 0, 2, 3, 18, 3),
        ContiguousRun(0, 3, 2, 2, 12, 3),
        ContiguousRun(2, 0, 1, 3, 6, 3),
        ContiguousRun(2, 3, 1, 2, 0, 3),
    )
    assert memory_runs(blocks, (3, 5), ((1, 3), (2, 3))) == (
        ContiguousRun(0, 0, 1, 1, 23, 3),
        ContiguousRun(1, 0, 1, 1, 8, 3),
    )
    assert memory_image(blocks, (3, 5), (((0, 3), (0, 5)),)).span == (0, 24)


def test_blocks_begin_where_tops_say():
    blocks = Blocks(4, 3, (1, 0), tops=(0, 2))  # of a matrix [6, 3]
    assert permutation_obstacle(blocks, (6, 3)) is None
    assert memory_runs(blocks, (6, 3), ((0, 6), (0, 3))) == (
        ContiguousRun(0, 0, 2, 3, 12, 3),
        ContiguousRun(2, 0, 4, 3, 0, 3),
    )
    for tops in ((0,), (1, 2), (0, 0), (0, 6), (2, 0)):
        assert "ascending rows" in str(permutation_obstacle(Blocks(4, 3, (1, 0), tops=tops), (6, 3))), tops


def test_billions_of_blocks_are_counted_and_not_listed():
    """As a file may name them: memory is limited only where a file is read."""
    obstacle = permutation_obstacle(Blocks(1, 2, (0, 1)), (2**31 - 1, 2))
    assert str(obstacle).startswith("names 2 places for 2147483647 blocks")


def test_a_call_that_has_the_first_rows_of_a_block_moves_its_whole_cell():
    blocks, part = Blocks(4, 3, (1, 0)), (((0, 3), (0, 3)),)
    assert memory_image(blocks, (8, 3), part).span == (12, 21)
    image = memory_image(blocks, (8, 3), part, by_cells=True)
    assert image.span == (12, 24)
    assert image.extra == (((3, 4), (0, 3)),)


@pytest.mark.parametrize(
    ("parts", "stretch"),
    [
        ((((0, 4), (0, 8)),), None),  # blocks 0 and 1, at places 2 and 0
        ((((0, 4), (0, 4)), ((4, 8), (4, 8))), (32, 64)),  # blocks 0 and 3, at places 2 and 3
        ((((0, 4), (4, 8)), ((4, 8), (0, 4))), (0, 32)),
        ((((0, 8), (0, 8)),), (0, 64)),
        ((((1, 2), (0, 4)),), (36, 40)),  # a whole row of a block
        ((((1, 3), (0, 3)),), None),
        ((((1, 2), (0, 3)),), (36, 39)),
    ],
)
def test_the_stretch_of_memory_that_rectangles_fill(parts, stretch):
    assert memory_image(Blocks(4, 4, (2, 0, 1, 3)), (8, 8), parts).span == stretch


def test_a_stack_of_blocks_lies_as_the_matrix_of_their_width_does():
    stack = Blocks(2, 4, (1, 0)), (4, 4), (((0, 2), (0, 4)),)
    dense = None, (2, 4), (((0, 2), (0, 4)),)
    assert memory_image(*stack).order == memory_image(*dense).order
    assert memory_image(Blocks(2, 4, (0, 1)), (4, 4), (((0, 4), (0, 4)),)).order == ((0, 0, 0, 4, 4, 0, 4),)


@pytest.mark.parametrize(
    ("places", "said"),
    [((0, 1, 2), "3 places for 4 blocks"), ((0, 1, 2, 2), "no bijection"), ((0, 1, 2, 4), "no bijection")],
)
def test_a_map_that_is_no_bijection_is_refused(places: tuple[int, ...], said: str):
    assert said in str(permutation_obstacle(Blocks(4, 4, places), (8, 8)))
    schedule = small().schedule
    good = places_of(schedule)
    assert verify_schedule(with_places(schedule, good)).ok
    for bad in (good[:-1], (*good[:-1], good[0]), (*good[:-1], len(good))):
        assert "the permutation of buffer staged" in str(verify_schedule(with_places(schedule, bad)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_wave_groups_are_proven_and_simulated(world_size: int):
    plan = small(world_size)
    verdict = verify_schedule(plan.schedule)
    assert verdict.ok, str(verdict)
    if world_size <= 4:
        assert total_us(plan, load("h200x4")) > 0


@pytest.mark.slow
def test_a_large_buffer_is_proven_in_two_seconds():
    plan = wave_groups(8, (32768, 8192, 8 * 1024), (128, 128), 132, 16)
    slow, begin = slowness(), process_time()
    assert verify_schedule(plan.schedule).ok
    assert process_time() - begin < 2 * slow


def changed_collective(plan: Plan, change: Callable[[Collective], Collective]) -> Schedule:
    operations = tuple(change(one) if isinstance(one, Collective) else one for one in plan.schedule.operations)
    return replace(plan.schedule, operations=operations)


def test_a_library_call_needs_one_stretch_of_memory():
    schedule = small().schedule
    places = places_of(schedule)
    swapped = (places[-1], *places[1:-1], places[0])  # the first and the last wave exchange a block
    assert "needs one contiguous span" in str(verify_schedule(with_places(schedule, swapped)))
    dense = tuple(replace(buffer, blocks=None) for buffer in schedule.buffers)
    assert "which share no permutation" in str(verify_schedule(replace(schedule, buffers=dense)))


def test_both_ends_of_a_library_call_have_the_same_order():
    def turned(one: Collective) -> Collective:
        parts = tuple(reversed(one.sources))
        return replace(one, sources=parts, destinations=parts) if one.rank == 1 else one

    refused = str(verify_schedule(changed_collective(small(), turned)))
    assert "does not fit" in refused or "lie in another order" in refused


def test_sums_are_not_finished_in_permuted_blocks():
    refused = verify_schedule(changed_collective(small(), lambda one: replace(one, finishes=True)))
    assert "finishes sums in permuted blocks" in str(refused)


def test_a_callers_tensor_has_no_permutation():
    schedule = small().schedule
    callers = tuple(replace(one, home="output") if one.blocks else one for one in schedule.buffers)
    assert "is the caller's" in str(verify_schedule(replace(schedule, buffers=callers)))


def pushes(places: tuple[int, ...], rows: tuple[int, int]) -> str:
    """What is said of a copy engine that pushes rows of x into a buffer of four blocks."""
    plan = small()
    landed = Buffer("landed", 40, 24, "symmetric", blocks=Blocks(20, 12, places))
    puts = tuple(
        Put(
            name=f"push.{rank}",
            rank=rank,
            queue="copies",
            sources=(Region("x", rank, rows, (0, 12)),),
            destinations=(Region("landed", 1 - rank, rows, (0, 12)),),
        )
        for rank in range(2)
    )
    source = tuple(replace(one, blocks=None) if one.name == "x" else one for one in plan.schedule.buffers)
    schedule = replace(
        plan.schedule,
        buffers=(*source, landed),
        queues=(*plan.schedule.queues, replace(plan.schedule.queues[0], name="copies")),
        operations=(*plan.schedule.operations, *puts),
    )
    engines = (*plan.realization.engines, EngineAssignment("copies", COPY_ENGINE))
    return str(
        verify_plan(
            replace(plan, schedule=schedule, realization=replace(plan.realization, engines=engines)), MachineLimits()
        )
    )


def test_a_copy_engine_takes_no_permuted_buffer():
    assert "a copy_engine addresses rows and columns" in pushes((0, 1, 2, 3), (0, 20))


def test_a_library_takes_permuted_blocks_by_collectives_alone():
    """The proof and the launch refuse the rest by the same words (`stretch_call`)."""
    said = [str(refusal) for refusal in verify_plan(small(), MachineLimits()).refusals]
    for kind in ("Compute", "Copy"):
        assert any("[engine]" in each and f"a library's {kind} addresses rows" in each for each in said)
    assert not any("Collective" in each for each in said)


def with_engine(plan: Plan, queue: str, engine: str) -> Plan:
    engines = tuple(replace(one, engine=engine) if one.queue == queue else one for one in plan.realization.engines)
    return replace(plan, realization=replace(plan.realization, engines=engines))


def test_tiles_that_are_no_blocks_are_refused():
    plan = with_engine(small(), "tiles", "tile_kernel")
    assert "its tiles are no blocks of the buffer" in str(verify_plan(plan, MachineLimits()))


def test_other_kernels_take_no_permuted_buffer():
    plan = with_engine(small(), "main", "copy_kernel")
    assert "a copy_kernel addresses rows and columns" in str(verify_plan(plan, MachineLimits()))


def test_the_permutation_is_printed_and_read_again():
    schedule = small().schedule
    text = to_text(schedule)
    assert "buffer staged [40, 30] local blocks 8x8 at 0 3 " in text
    assert from_text(text) == schedule
    assert from_json(to_json(schedule)) == schedule
    typed = replace(schedule, buffers=tuple(replace(one, dtype="float32") for one in schedule.buffers))
    assert from_text(to_text(typed)) == typed
    empty = replace(schedule, buffers=(*schedule.buffers, Buffer("none", 0, 8, "local", blocks=Blocks(1, 1, ()))))
    assert from_text(to_text(empty)) == empty
