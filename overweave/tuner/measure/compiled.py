"""Which way a compiled kernel runs: the model ranks, a tuning measures the best few, and a file keeps what came out.

Between chunks: the schedule of each tensor, its pieces and movers. Within a chunk: the constants of the kernel's tile,
and of its launch. Both are coordinates of one space, and the search goes along one after the other.
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
from overweave.tuner.caches import cache_folders, encoded, keep_file, recall_if_readable
from overweave.tuner.model.weigh import Model, Weighed
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
    """What a tuning found, the quickest first. key: of what was measured (`content_key`)."""

    key: str
    times: tuple[TimedWay, ...]


def described(target: Target, world_size: int) -> Machine | None:
    """The machine that predictions are made on: the target's, or for a CPU, where nothing is timed, a GPU's."""
    return (target if target.kind == "cuda" else Target("cuda")).machine(world_size)


def judge(
    asked: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...], predict: Predict, machine: Machine | None
) -> tuple[RankedWay, ...]:
    """Every way that was looked at, in the order of looking; the library's with the first constants stands first.

    The schedules of one tensor after the other are explored; then the constants, with the schedules as they are.
    machine: None where none is described: then nothing is predicted.
    """
    model: Model[KernelWay] = Model(lambda way, _: None if machine is None else predict(way, machine))
    by_tensor = {tensor: families(how) for tensor, how in asked.items()}
    best = KernelWay(tuple((tensor, known[0].first) for tensor, known in by_tensor.items()), configs[0])
    model(best)
    for tensor, known in by_tensor.items():
        model.explore([ExchangeWays(best, tensor, family) for family in known])
        best = min(model.known.values(), key=lambda each: each.us).candidate
    for constants in configs[1:]:
        model(replace(best, constants=constants))
    return tuple(model.known.values())


def cold(judged: tuple[RankedWay, ...]) -> KernelWay:
    """The quickest by prediction; the library's, which stands first, is given the margin that operators give it."""
    base = judged[0]
    if base.predicted_us is None:
        return next((each.candidate for each in judged if not each.obstacle), base.candidate)
    ahead_us = WITH_KERNELS.us + WITH_KERNELS.share * base.predicted_us

    def judged_us(each: RankedWay) -> float:
        return each.us + (0.0 if each.candidate.exchanges == base.candidate.exchanges else ahead_us)

    return min(judged, key=judged_us).candidate


def shortlist(judged: tuple[RankedWay, ...]) -> tuple[KernelWay, ...]:
    """What is worth measuring first: the library's way, the best of each of the best few schedules with each back end,
    whose options the model hardly tells apart, and the best of all in all other constants."""
    possible = [each.candidate for each in sorted(judged, key=lambda each: each.us) if not each.obstacle]
    first = [each.candidate for each in judged if not each.obstacle][:1]
    of_base = [way for way in possible if way.constants == judged[0].candidate.constants]
    of_schedules: dict[tuple[str, ...], KernelWay] = {}
    for way in of_base:
        of_schedules.setdefault(_kind(way), way)
    varied = [way for way in possible if of_base and way.exchanges == of_base[0].exchanges]
    return tuple(dict.fromkeys([*first, *list(of_schedules.values())[:MOST_MEASURED], *varied]))


def around(base: Constants, times: tuple[TimedWay, ...], asked: Mapping[str, ScheduleChoice]) -> tuple[KernelWay, ...]:
    """What is worth measuring next: the best that was measured, varied along one coordinate after the other.

    times: the quickest first. The schedules that were best with the constants `base` are taken with the best few
    constants; their options are varied one by one with the best constants.
    """
    best = next((one.way for one in times if one.way.constants == base), times[0].way)
    constants = list(dict.fromkeys(one.way.constants for one in times))[:MOST_AROUND]
    ways = [replace(best, constants=each) for each in constants]
    ways += neighbours(replace(best, constants=constants[0]), asked)
    measured = {one.way for one in times}
    return tuple(way for way in dict.fromkeys(ways) if way not in measured)


def content_key(*parts: object) -> str:
    """The digest of everything that a measurement depends on, as text."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def kept_path(name: str, key: str) -> Path:
    """Where the tuning of a kernel is kept: another file for any other content."""
    return cache_folders()["overweave"] / "compiled" / f"{name}.{key}.json"


def recall(
    name: str, key: str, asked: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...]
) -> TunedTimes | None:
    """What was measured of this very content. A file that holds anything else is ignored aloud."""

    def read(data: bytes) -> TunedTimes:
        found = msgspec.json.decode(data, type=TunedTimes)
        strange = [each.way for each in found.times if not is_member(each.way, asked, configs)]
        if found.key != key or strange or not found.times:
            raise InputError("compiled kernel", f"it names what nobody could have measured: {strange[:1]}", "")
        return found

    return recall_if_readable(kept_path(name, key), read, LARGEST_BYTES)


def remember(name: str, measured: TunedTimes) -> None:
    """Keeps a tuning for later processes. Warns if it cannot be written."""
    keep_file(kept_path(name, measured.key), lambda: encoded(measured))


def _kind(way: KernelWay) -> tuple[str, ...]:
    """The schedule of each tensor, and who carries it."""
    parts = ((word for word in how.split()[1:] if word.startswith("mover=")) for _, how in way.exchanges)
    names = (how.split()[0] for _, how in way.exchanges)
    return tuple(" ".join((name, *movers)) for name, movers in zip(names, parts, strict=True))
