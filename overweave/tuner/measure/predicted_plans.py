"""Predicted times of plans that are programs of their own (schedules/records/programs.py): what each takes, and which
would be taken unmeasured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.ir.exchange import addresses_peers, crossing_operation
from overweave.ir.schedule import Apply, Schedule
from overweave.schedules.records.option_sets import NOT_MEASURED
from overweave.sim.realize import realize
from overweave.sim.simulate import total_us
from overweave.tuner.measure.bench import Measures, Roofs, measure

PredictedCase = TypeVar("PredictedCase")
KernelUs = Callable[[Apply], float]  # microseconds of an operation's kernel, which has all SMs


class Predicted(Struct, Generic[PredictedCase], frozen=True):
    """Predicted microseconds of a case. alone_us: what is computed, without communication. link_us: the library's
    collectives alone. plans: plan -> time, of those that the machine can run, the sequential one first. choice: the
    plan that would be taken unmeasured."""

    case: PredictedCase
    alone_us: float
    link_us: float
    plans: dict[str, float]
    choice: str

    def measures(self, plan: str) -> Measures:
        """Return what of the communication a plan hides."""
        return self.measures_of(self.plans[plan])

    def measures_of(self, time_us: float) -> Measures:
        """Return what of it is hidden in so many microseconds."""
        sequential_us = next(iter(self.plans.values()))
        roofs = Roofs(matmul_us=self.alone_us, communication_us=self.link_us, sequential_us=sequential_us)
        return measure(time_us, roofs)


def plans_us(schedules: Iterable[tuple[str, Schedule, KernelUs]], machine: Machine) -> dict[str, float]:
    """Return plan -> time, of those that the machine can run."""
    return {
        plan: total_us(realize(schedule, machine), machine, kernel_us)
        for plan, schedule, kernel_us in schedules
        if (machine.peer_access or not addresses_peers(schedule)) and not crossing_operation(schedule, machine.islands)
    }


def choice_of(plans: dict[str, float], base: str) -> str:
    """Return the quickest plan, unless the base is within the margin of what nobody measured."""
    base_us, margin = plans[base], NOT_MEASURED.margin
    quickest = min(plans, key=plans.__getitem__)
    return quickest if plans[quickest] + margin.us + margin.share * base_us < base_us else base
