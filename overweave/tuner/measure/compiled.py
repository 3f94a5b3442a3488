"""The tuning of an author's compiled kernel: the model ranks, a tuning measures the best few, and a file keeps the
times.

Between chunks: the schedule of each tensor, its pieces and movers. Within a chunk: the constants of the kernel's tile,
and of its launch. All are coordinates of one space, which the search varies one after the other.
SOURCE: AutoOverlap 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.schedules.records.record import WITH_KERNELS
from overweave.schedules.weave.transports import ScheduleChoice
from overweave.tuner.caches import cache_folders, encode, read_cached_if_readable, save_file
from overweave.tuner.model.candidate_model import Model, Weighed
from overweave.tuner.space.compiled import Constants, ExchangeWays, KernelWay, families, is_member, neighbours
from overweave.tuner.space.target import Target

LARGEST_BYTES = 1 << 20
MOST_MEASURED, MOST_AROUND, FINALISTS = 8, 4, 4

Predict = Callable[[KernelWay, Machine], float]  # microseconds; raises OverweaveError for a way that cannot be


RankedWay = Weighed[KernelWay]


class TimedWay(Struct, frozen=True, forbid_unknown_fields=True):
    way: KernelWay
    us: float


class TunedTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The times of a tuning, the fastest first. key: of the measured content (`content_key`)."""

    key: str
    times: tuple[TimedWay, ...]


def prediction_machine(target: Target, world_size: int) -> Machine | None:
    """Return the machine for predictions: the target's, or for a CPU, where nothing is timed, a GPU's."""
    return (target if target.kind == "cuda" else Target("cuda")).machine(world_size)


def rank_ways(
    choices: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...], predict: Predict, machine: Machine | None
) -> tuple[RankedWay, ...]:
    """Return every way that was looked at, in that order; the library's with the first constants is the first.

    The schedules of one tensor after the other are explored; then the constants, with the best schedules. machine: None
    if none is described: then nothing is predicted.
    """
    model: Model[KernelWay] = Model(lambda way, _: None if machine is None else predict(way, machine))
    by_tensor = {tensor: families(how) for tensor, how in choices.items()}
    best = KernelWay(tuple((tensor, known[0].first) for tensor, known in by_tensor.items()), configs[0])
    model(best)
    for tensor, known in by_tensor.items():
        ways = [ExchangeWays(best, tensor, family) for family in known]
        # A schedule without options must not cut off those whose options may beat it.
        model.explore([each for each in ways if each.grid])
        for each in ways:
            if not each.grid:
                model(each.member({}))
        best = min(model.results.values(), key=lambda each: each.us).candidate
    for constants in configs[1:]:
        model(replace(best, constants=constants))
    return tuple(model.results.values())


def predicted_best(judged: tuple[RankedWay, ...]) -> KernelWay:
    """Return the way with the least predicted time. The library's way is preferred by the margin that operators use."""
    base = judged[0]
    if base.predicted_us is None:
        return next((each.candidate for each in judged if not each.obstacle), base.candidate)
    ahead_us = WITH_KERNELS.us + WITH_KERNELS.share * base.predicted_us

    def judged_us(each: RankedWay) -> float:
        return each.us + (0.0 if each.candidate.exchanges == base.candidate.exchanges else ahead_us)

    return min(judged, key=judged_us).candidate


def shortlist(judged: tuple[RankedWay, ...]) -> tuple[KernelWay, ...]:
    """Return the ways to measure first. These are the library's way, the best of each of the best few schedules with
    each mover, whose options the model hardly distinguishes, and the best of all with all other constants."""
    possible = [each.candidate for each in sorted(judged, key=lambda each: each.us) if not each.obstacle]
    first = [each.candidate for each in judged if not each.obstacle][:1]
    of_base = [way for way in possible if way.constants == judged[0].candidate.constants]
    of_schedules: dict[tuple[str, ...], KernelWay] = {}
    for way in of_base:
        of_schedules.setdefault(_schedules_and_movers(way), way)
    varied = [way for way in possible if of_base and way.exchanges == of_base[0].exchanges]
    return tuple(dict.fromkeys([*first, *list(of_schedules.values())[:MOST_MEASURED], *varied]))


def refinements(
    base: Constants, timed: tuple[KernelWay, ...], choices: Mapping[str, ScheduleChoice]
) -> tuple[KernelWay, ...]:
    """Return the ways to measure next: the best measured way, varied along one coordinate after the other.

    timed: the fastest first. The schedules that were best with the constants `base` are combined with the best few
    constants; their options are varied one by one with the best constants.
    """
    best = next((way for way in timed if way.constants == base), timed[0])
    constants = list(dict.fromkeys(way.constants for way in timed))[:MOST_AROUND]
    ways = [replace(best, constants=each) for each in constants]
    ways += neighbours(replace(best, constants=constants[0]), choices)
    return tuple(way for way in dict.fromkeys(ways) if way not in timed)


def content_key(*parts: object) -> str:
    """Return the digest of everything that a measurement depends on, as text."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def tuning_path(name: str, key: str) -> Path:
    """Return the file of a kernel's tuning: another file for any other content."""
    return cache_folders()["overweave"] / "compiled" / f"{name}.{key}.json"


def read_tuning(
    name: str, key: str, choices: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...]
) -> TunedTimes | None:
    """Return the tuning of this content, None if there is none. A file that holds anything else is ignored with a
    warning."""

    def read(data: bytes) -> TunedTimes:
        tuning = msgspec.json.decode(data, type=TunedTimes)
        strange = [each.way for each in tuning.times if not is_member(each.way, choices, configs)]
        if tuning.key != key or strange or not tuning.times:
            raise InputError("compiled kernel", f"it names what nobody could have measured: {strange[:1]}", "")
        return tuning

    return read_cached_if_readable(tuning_path(name, key), read, LARGEST_BYTES)


def save_tuning(name: str, measured: TunedTimes) -> None:
    """Save a tuning for later processes. Warns if it cannot be written."""
    save_file(tuning_path(name, measured.key), lambda: encode(measured))


def _schedules_and_movers(way: KernelWay) -> tuple[str, ...]:
    """Return the schedule of each tensor, with its mover."""
    parts = ((word for word in how.split()[1:] if word.startswith("mover=")) for _, how in way.exchanges)
    names = (how.split()[0] for _, how in way.exchanges)
    return tuple(" ".join((name, *movers)) for name, movers in zip(names, parts, strict=True))
