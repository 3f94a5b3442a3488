"""Plans of authors' kernels run on paper, once a tile has a time; what that may be is guessed from what tiles touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.hardware.machine import Latency, load
from overweave.ir.footprint import Axis, Dim, Operand, TileSpace
from overweave.ir.plan import AUTHOR_KERNEL
from overweave.ir.schedule import Apply
from overweave.ir.timeline.timeline import COMPUTE
from overweave.moe.programs import Sizes, schedule_of
from overweave.schedules.weave.author_plan import author_plan
from overweave.sim.cost import estimate_tile_us, library_matmul_us, tile_us
from overweave.sim.realize import realize
from overweave.sim.simulate import simulate, total_us
from tests.tile_spaces import attention, matmul

MACHINE, TILE_US, TILE = load("h200x4"), 40.0, (128, 256)
HEADS: dict[str, Any] = {"width": 128, "queries": 1024, "heads": 16, "block": (128, 64)}


def predicted_us(space: TileSpace, wanted: dict[str, str], tile: float = TILE_US) -> float:
    return total_us(author_plan(space, wanted, 4, "bfloat16", dual_source="A"), MACHINE, tile)


def test_overlap_pays_where_the_link_is_busy_beside_tiles():
    space = matmul(8192, 3584, 4096, TILE)
    waves = -(-space.tile_count // MACHINE.processor.sms)
    library, push = (predicted_us(space, {"A": f"all_gather.{how}"}) for how in ("collective", "push"))
    assert waves * TILE_US < push < library - 100
    scatter, behind = (predicted_us(space, {"C": f"reduce_scatter.{how}"}) for how in ("scatter", "collective"))
    assert waves * TILE_US < scatter < behind


def test_a_schedule_of_an_authors_kernel_runs_on_its_stream_and_each_tile_takes_its_own_time():
    plan = author_plan(matmul(1024, 256, 512, TILE), {"A": "all_gather.push"}, 4, "bfloat16")
    found = realize(plan.schedule, MACHINE)
    kernels = {operation.queue for operation in plan.schedule.operations if isinstance(operation, Apply)}
    assert {found.realization.engine_of(queue) for queue in kernels} == {AUTHOR_KERNEL}
    late_us = total_us(found, MACHINE, lambda tile: 500.0 if tile.rank == 3 else 1.0)
    assert total_us(found, MACHINE, 1.0) < 500.0 < late_us == total_us(found, MACHINE, lambda tile: 500.0)
    # Each has all SMs: a rank's follow one another, where tiles of an SM each run side by side.
    tiles = sum(operation.instances for operation in plan.schedule.of_rank(3) if isinstance(operation, Apply))
    assert tiles * 500.0 < late_us < tiles * 501.0 + 500.0
    assert total_us(found, MACHINE, 500.0) < 2 * 500.0


def test_tiles_wait_for_their_chunks():
    """All tiles are the own ones' time and the transfer's, whichever is longer: a slow link shows."""
    space = matmul(8192, 256, 4096, TILE)
    timeline = simulate(author_plan(space, {"A": "all_gather.push"}, 4, "bfloat16"), MACHINE, author_tile_us=1.0)
    moved_us = 3 * MACHINE.links.push.time_us(2048 * 4096 * 2)
    assert timeline.total_us > moved_us
    assert {span.kind for span in timeline.spans} >= {COMPUTE}


def test_a_streamed_tile_ends_behind_its_last_part():
    fast, slow = (
        predicted_us(attention(16384, **HEADS), {"K": how, "V": how}, 1.0)
        for how in ("all_gather.push", "all_gather.pull")
    )
    assert min(fast, slow) > 2 * 3 * 4096 * 16 * 128 * 2 / 400e3  # both operands cross the link
    longer = predicted_us(attention(16384, **HEADS), {"K": "all_gather.push", "V": "all_gather.push"}, 400.0)
    assert 400.0 < longer < 400.0 + fast


def test_a_kernel_waits_for_all_signals_of_a_peers_at_once_and_events_cost_nothing():
    """As calls of kernels fused by hand do (runtime/gpu/handwritten.py)."""
    plan = realize(schedule_of("chain", Sizes(64, 64, 2, torch.bfloat16, 4, 4), 64), MACHINE)
    usual = total_us(plan, MACHINE, lambda tile: 1.0)

    def longer_us(name: str) -> float:
        latency = replace(MACHINE.latency, **{name: Latency(getattr(MACHINE.latency, name).us + 100.0, "")})
        return total_us(plan, replace(MACHINE, latency=latency), lambda tile: 1.0) - usual

    # Copies wait for own kernels, by events; the caller's stream for slots, for landed columns and for the last ones.
    assert longer_us("stream_wait") == 0.0
    assert 600.0 < longer_us("observe") <= 300.0 + 400.0  # and each of four tiles for its shard


def test_an_authors_tile_without_a_time_is_refused():
    plan = author_plan(matmul(512, 256, 64, TILE), {"A": "all_gather.push"}, 4, "bfloat16")
    with pytest.raises(ScheduleError, match="Give the time, as `overweave simulate --tile-us 10` does"):
        simulate(plan, MACHINE)


def test_the_guess_is_exact_for_matmuls():
    space = matmul(8192, 3584, 4096, TILE)
    rate = MACHINE.tile("portable", 128, 256)
    assert estimate_tile_us(MACHINE, space, "bfloat16") == pytest.approx(
        tile_us(MACHINE, rate, (128, 256, 4096), "bfloat16")
    )
    whole_us = predicted_us(space, {"A": "all_gather.collective"}, estimate_tile_us(MACHINE, space, "bfloat16"))
    gather_us = MACHINE.collective_us("all_gather", 4, 8192 * 4096 * 2)
    assert whole_us == pytest.approx(library_matmul_us(MACHINE, (8192, 3584, 4096), "bfloat16") + gather_us, rel=0.15)


def test_what_only_moves_is_bound_by_memory():
    rows, cols = 8192, 4096
    space = TileSpace(
        "norm",
        (Axis("R", rows, 1),),
        loads=(Operand("X", "x", (Dim(rows, "R"), Dim(cols))),),
        stores=(Operand("OUT", "out", (Dim(rows, "R"), Dim(cols))),),
    )
    waves = -(-rows // MACHINE.processor.sms)
    expected_us = 2 * rows * cols * 2 / MACHINE.hbm.gb_per_s / 1e3 / waves
    assert estimate_tile_us(MACHINE, space, "bfloat16") == pytest.approx(expected_us)
