"""Waves on SMs: claims in order, waits, two kernels, and a slow-down in the middle."""

from __future__ import annotations

import pytest

from overweave.sim.events import EventQueue
from overweave.sim.processor import Batch, RunningKernel, StreamingMultiprocessors, TileRun


class Bench:
    """Runs kernels on a processor and notes when which tiles ended."""

    def __init__(self, sms: int) -> None:
        self.clock = EventQueue()
        self.processor = StreamingMultiprocessors(self.clock, sms)
        self.ended: list[tuple[str, int, float]] = []

    def run(self, name: str, count: int, tile_us: float, delay_us: float = 0.0, ready: bool = True) -> TileRun:
        def note(batch: Batch) -> None:
            self.ended.append((name, len(batch.programs), round(self.clock.now, 6)))

        run = TileRun(count, tile_us, delay_us, note)
        run.ready_us = 0.0 if ready else None
        return run

    def launch_at(self, time_us: float, *runs: TileRun, programs: int = 99) -> None:
        self.clock.at(time_us, lambda: self.processor.launch(RunningKernel(list(runs), programs)))


def test_the_last_wave_is_partial():
    bench = Bench(4)
    bench.launch_at(0, bench.run("a", 10, 7.0))
    bench.clock.run()
    assert bench.ended == [("a", 4, 7.0), ("a", 4, 14.0), ("a", 2, 21.0)]


def test_free_programs_go_on_with_the_next_run():
    bench = Bench(4)
    bench.launch_at(0, bench.run("a", 3, 10.0), bench.run("b", 3, 6.0))
    bench.clock.run()
    assert bench.ended == [("b", 1, 6.0), ("a", 3, 10.0), ("b", 1, 12.0), ("b", 1, 16.0)]


def test_programs_claim_tiles_that_are_not_ready_and_hold_their_sms():
    bench = Bench(2)
    late, behind = bench.run("late", 2, 5.0, delay_us=1.0, ready=False), bench.run("behind", 1, 5.0)
    bench.launch_at(0, late, behind)
    bench.clock.at(20, lambda: bench.processor.release(late))
    bench.clock.run()
    assert bench.ended == [("late", 2, 26.0), ("behind", 1, 31.0)]


def test_a_kernel_waits_for_sms_and_a_bounded_one_takes_no_more_than_its_share():
    bench = Bench(4)
    bench.launch_at(0, bench.run("first", 4, 10.0))
    bench.launch_at(1, bench.run("second", 4, 10.0), programs=3)
    bench.launch_at(2, bench.run("third", 1, 1.0))
    bench.clock.run()
    assert bench.ended == [("first", 4, 10.0), ("third", 1, 11.0), ("second", 3, 20.0), ("second", 1, 30.0)]


def test_a_slow_down_stretches_what_is_left():
    bench = Bench(1)
    bench.launch_at(0, bench.run("a", 2, 10.0))
    bench.clock.at(5, lambda: bench.processor.set_slowdown(2.0))
    bench.clock.at(13, lambda: bench.processor.set_slowdown(1.0))
    bench.clock.run()
    assert bench.ended == [("a", 1, 14.0), ("a", 1, 24.0)]  # 5 + 8 / 2 + 1


@pytest.mark.parametrize("sms", [1, 7, 132])
def test_every_tile_runs_once(sms: int):
    bench = Bench(sms)
    runs = [bench.run("a", count, 3.0 + count) for count in (100, 0, 1, 57)]
    bench.launch_at(0, *runs)
    bench.clock.run()
    assert sum(count for _, count, _ in bench.ended) == 158


def test_tiles_that_add_hold_their_sms_until_what_they_add_is_there():
    bench = Bench(2)
    late, behind = bench.run("late", 3, 5.0), bench.run("behind", 1, 4.0)
    late.late_us, late.is_late_ready = 2.0, False
    bench.launch_at(0, late, behind)
    bench.clock.at(9, lambda: bench.processor.release_late(late))
    bench.clock.run()
    # Two are computed at 5, wait until 9 and add until 11; the third finds the addends there.
    assert bench.ended == [("late", 2, 11.0), ("behind", 1, 15.0), ("late", 1, 18.0)]


def test_a_collective_slows_matmuls_of_the_library_alone():
    """Two SMs: a matmul of the library on one, a kernel of ours on the other; a collective from 2 to 6 us."""
    clock, ends = EventQueue(), {}
    processor = StreamingMultiprocessors(clock, 2, library_slowdown=2.0)

    def launch(name: str, is_library_matmul: bool) -> None:
        run = TileRun(1, 10.0, 0.0, lambda batch: ends.update({name: clock.now}))
        run.ready_us = 0.0
        processor.launch(RunningKernel([run], 1, is_library_matmul))

    launch("library", True)
    launch("ours", False)
    clock.at(2.0, lambda: processor.count_collectives(1))
    clock.at(3.0, lambda: processor.count_collectives(1))  # one beside another slows no more
    clock.at(5.0, lambda: processor.count_collectives(-1))
    clock.at(6.0, lambda: processor.count_collectives(-1))
    clock.run()
    assert ends == {"library": 12.0, "ours": 10.0}
