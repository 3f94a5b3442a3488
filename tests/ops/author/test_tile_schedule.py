"""Static tile programs as Schedules: proven and simulated; what is wrong in them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, LIBRARY, Engine, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Reads, TileEffect
from overweave.sim.simulate import simulate
from tests.lang import primitive_kernels as kernels
from tests.lang.tile_programs import COLS, ROWS, Gathered, Pushed


def schedule_of(program: Any, ranks: int) -> Schedule:
    callers = {
        "x": CallersMatrix(ROWS, COLS, "x", is_shard=True),
        "out": CallersMatrix(ROWS, COLS, "x", is_result=True),
    }
    return tile_schedule(type(program).__name__, program.declared, callers, ranks, program.write)


def rules(schedule: Schedule) -> set[str]:
    return {refusal.rule for refusal in verify_schedule(schedule).refusals}


@pytest.mark.parametrize("make", [Gathered, Pushed])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_proven(make: Callable[[int], Any], ranks: int):
    verify_schedule(schedule_of(make(ranks), ranks)).raise_if_refused()


@pytest.mark.parametrize("make", [Gathered, Pushed])
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_is_simulated(make: Callable[[int], Any], ranks: int):
    schedule = schedule_of(make(ranks), ranks)
    engines = tuple(EngineAssignment(queue.name, engine_of(queue.name)) for queue in schedule.queues)
    problem = Problem(operator="", m=ROWS, n=COLS, k=0, world_size=ranks, dtype="float32")
    realization = Realization(dtype="float32", engines=engines)
    plan = Plan(name=schedule.name, problem=problem, schedule=schedule, realization=realization)
    assert simulate(plan, load("h200x4"), author_tile_us=2.0).total_us > 2.0


def engine_of(queue: str) -> Engine:
    if "." in queue:
        return AUTHOR_KERNEL
    return LIBRARY if queue == "main" else COPY_ENGINE


class Untold(Gathered):
    """Copies arrive, and nobody says so."""

    def tell(self, call: TileCall, peer: int) -> None:
        pass


class Early(Pushed):
    """Tiles are read before anything says that they are there."""

    def read(self) -> Reads:
        return Reads("whole", "x")


class Shifted(Pushed):
    """Tiles are stored where those of another tensor belong."""

    def effects(self) -> tuple[TileEffect, ...]:
        made, read = super().effects()
        return made, TileEffect(read.tiles, "out", "z", read.reads)


@pytest.mark.parametrize(("make", "rule"), [(Untold, "signal"), (Early, "signal"), (Shifted, "value")])
def test_what_is_wrong_is_refused(make: Callable[[int], Any], rule: str):
    assert rule in rules(schedule_of(make(2), 2))


def test_a_wait_that_a_consumer_leaves_out_is_a_race():
    schedule = schedule_of(Pushed(2), 2)
    taken = next(one for one in schedule.operations if one.waits)
    last = [replace(one, waits=()) if one.name == taken.name else one for one in schedule.operations]
    assert rules(replace(schedule, operations=tuple(last))) & {"race", "signal"}


def test_tiles_of_which_nothing_is_said_and_dynamic_mappings_are_not_proven():
    class Silent(Gathered):
        def effects(self) -> tuple[TileEffect, ...]:
            return ()

    with pytest.raises(InputError, match="nobody says"):
        schedule_of(Silent(2), 2)


@pytest.mark.parametrize("passed", [("producer_table", "counts"), ("consumer_table",)])
def test_a_mapping_that_is_filled_at_run_time_is_not_proven(passed: tuple[str, ...]):
    """Whichever part of it: producers' tables, or that of consumers alone, for which no static one may stand."""

    class Filled(Pushed):
        def write(self, call: TileCall, x: Any, out: Any) -> None:
            channel = self.declared.channels["gathered"]
            tables = {
                "producer_table": channel.producer_table(),
                "consumer_table": channel.consumer_table(),
                "counts": [1] * channel.counters,
            }
            found = {name: torch.tensor(tables[name], dtype=torch.int32) for name in passed}
            arguments = (
                call.channel("gathered", **found),
                call.tensor("whole"),
                x,
                out,
                ROWS,
                COLS,
                kernels.NOTHING.value,
            )
            call.launch(kernels.gather_kernel, 1, *arguments, tile_effects=self.effects())

    with pytest.raises(InputError, match="filled at run time"):
        schedule_of(Filled(2), 2)
