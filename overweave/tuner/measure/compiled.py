"""The tuning of an author's compiled kernel: the model ranks, a tuning measures the best few, and a file keeps the
times.

Between chunks: the schedule of each tensor, its pieces and movers. Within a chunk: the constants of the kernel's tile,
and of its launch. All are coordinates of one space, which the search varies one after the other.
SOURCE: AutoOverlap 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.schedules.communication import COPYING_KERNELS, Mover
from overweave.schedules.moves.moves import AUTO as OPEN_MOVER
from overweave.schedules.moves.moves import movers_in, settled
from overweave.schedules.records.options import ANY_MOVER, COPY_PROGRAMS, Option, settle
from overweave.schedules.records.record import WITH_KERNELS
from overweave.schedules.weave.transports import ScheduleChoice, TransportDirection, obstacle, transport_of, transports
from overweave.tuner.caches import cache_folders, encode, read_cached_if_readable, save_file
from overweave.tuner.model.candidate_model import Model, Weighed
from overweave.tuner.space.target import Target

# The search space of an author's compiled kernel: the schedules of each of its tensors, and the constants of its
# launch.
#
# `all_gather.auto` stands for every `all_gather.*` with values for its options, the library's first. The options of a
# schedule come from its record, so a newly registered schedule or mover is searched too.

AUTO = ".auto"
BY_HAND = "by_hand"
OPEN = (ANY_MOVER, COPY_PROGRAMS)  # the options of a list by hand
# Option -> tried values, if these are numbers. Of options with choices all are tried; others keep their default.
TRIED: dict[str, tuple[int, ...]] = {
    "pieces": (2, 1, 4),
    "own_pieces": (4, 1),
    "col_pieces": (1, 2),
    "lanes": (1, 2),
    "copy_programs": (16, 8, 32),
}
UNTRIED = ("axis", "island")  # layout that only the caller knows
ENGINE, MOVER = "copy_engine", "mover"
Constants = tuple[tuple[str, int], ...]
WayValue = int | str | tuple[int, ...] | None


class KernelWay(Struct, frozen=True):
    """One way to run a compiled kernel: a schedule for each exchanged tensor, and constants of the launch."""

    exchanges: tuple[tuple[str, str], ...]
    constants: Constants = ()

    def __str__(self) -> str:
        words = [f"{tensor}={how}" for tensor, how in self.exchanges]
        return "; ".join([*words, *(f"{name}={value}" for name, value in self.constants)])

    def with_exchange(self, tensor: str, how: str) -> KernelWay:
        """Return the way with another schedule for one tensor."""
        changed = tuple((name, how if name == tensor else words) for name, words in self.exchanges)
        return KernelWay(changed, self.constants)


class ScheduleFamily(Struct, frozen=True):
    """One schedule with all tried values of its options, the defaults first."""

    name: str
    options: tuple[Option, ...]

    @property
    def grid(self) -> dict[str, tuple[WayValue, ...]]:
        """Return option -> tried values."""
        return {option.name: _tried_values(option) for option in self.options}

    @property
    def first(self) -> str:
        return next(self.members())

    def member(self, options: Mapping[str, WayValue]) -> str:
        """Return the schedule with these options, as text; defaults are left out, and options that the mover does not
        use."""
        named = dict(options)
        if named.get(MOVER, ENGINE) not in COPYING_KERNELS:
            named.pop("copy_programs", None)
        words = [f"{o.name}={named[o.name]}" for o in self.options if named.get(o.name, o.default) != o.default]
        return " ".join([self.name, *words])

    def members(self) -> Iterator[str]:
        """Yield all members that a mover can carry out; some come more than once."""
        for chosen in product(*self.grid.values()):
            named = dict(zip(self.grid, chosen, strict=True))
            mover = cast("Mover", named.get(MOVER, ENGINE))
            if mover == ENGINE or self.name == BY_HAND or not obstacle(self.name, mover):
                yield self.member(named)


class ExchangeWays(NamedTuple):
    """The ways that differ from one in the schedule of one tensor, within a family."""

    way: KernelWay
    tensor: str
    family: ScheduleFamily

    @property
    def grid(self) -> dict[str, tuple[WayValue, ...]]:
        return self.family.grid

    def member(self, options: Mapping[str, WayValue]) -> KernelWay:
        return self.way.with_exchange(self.tensor, self.family.member(options))


def families(choice: ScheduleChoice) -> tuple[ScheduleFamily, ...]:
    """Return the schedules that `all_gather.auto` stands for, the library's first; of any other words, themselves.

    Of moves by hand: that list, with values for the movers and SMs that it leaves open. Raises InputError for a
    collective without schedules.
    """
    if not isinstance(choice, str):
        return (ScheduleFamily(BY_HAND, OPEN if OPEN_MOVER in movers_in(choice) else ()),)
    if not is_auto(choice):
        return (ScheduleFamily(choice, ()),)
    collective = choice.removesuffix(AUTO)
    known = transports()
    names = [name for name in known if f"{name}_".startswith((f"{collective}.", f"{collective}_"))]
    # Of moves that are written for given links the caller names the links: they stand for no others.
    names = [name for name in names if all(option.name != "links" for option in known[name].options)]
    if not names:
        valid = sorted({name.split(".")[0] + AUTO for name in known})
        raise InputError(f"schedule {choice[:40]!r}", "there is no such collective", f"Use one of {', '.join(valid)}")
    names = sorted(names, key=lambda name: known[name].is_woven)
    if len({known[name].side for name in names}) > 1:
        found = f"{' and '.join(names)} move different things"
        raise InputError(f"schedule {choice[:40]!r}", found, "Name one of them")
    return tuple(
        ScheduleFamily(name, tuple(one for one in known[name].options if one.name not in UNTRIED)) for name in names
    )


def neighbours(way: KernelWay, choices: Mapping[str, ScheduleChoice]) -> Iterator[KernelWay]:
    """Yield the ways that differ from a way in one option of one automatic schedule; the mover stays."""
    for tensor, how in way.exchanges:
        name, *pairs = how.split()
        family = next(one for one in families(choices[tensor]) if one.name.split()[0] == name)
        words = dict(pair.split("=") for pair in pairs)
        options = {one.name: one.parse(words[one.name]) if one.name in words else one.default for one in family.options}
        for option in (name for name in family.grid if name != MOVER):
            changed = (family.member({**options, option: value}) for value in family.grid[option])
            yield from (way.with_exchange(tensor, member) for member in changed)


def with_side(choice: str, is_read: bool) -> str:
    """Return an automatic schedule of one side: an all-to-all before a kernel moves other tensors than one behind
    it."""
    unsided = "all_to_all" + AUTO
    return f"all_to_all.{'receive' if is_read else 'send'}{AUTO}" if choice == unsided else choice


def close_choices(written: ScheduleChoice, how: str) -> ScheduleChoice:
    """Return the schedule that a way's words name; of a list by hand, with its open movers filled in."""
    if isinstance(written, str):
        return how
    settings = settle(BY_HAND, OPEN, dict(pair.split("=") for pair in how.split()[1:]))
    programs = settings.copy_programs if settings.mover in COPYING_KERNELS else written.copy_programs
    return settled(replace(written, copy_programs=programs), settings.mover)


def is_auto(choice: object) -> bool:
    """Whether a schedule leaves the choice to the tuner."""
    return isinstance(choice, str) and choice.endswith(AUTO) and choice.split() == [choice]


def is_in_search_space(way: KernelWay, choices: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...]) -> bool:
    """Whether a way lies in the search space of these choices and configurations. A tuning file that holds any
    other way is ignored as a whole."""
    exchanges = dict(way.exchanges)
    return (
        way.constants in configs
        and exchanges.keys() == choices.keys()
        and all(exchanges[tensor] in _all_members(how) for tensor, how in choices.items())
    )


def side_of(choice: ScheduleChoice) -> TransportDirection:
    """Return whether a schedule, automatic or not, moves what a kernel reads or writes. Raises InputError."""
    if not isinstance(choice, str):
        return transport_of(choice).side
    return transport_of(families(choice)[0].name).side


def _all_members(choice: ScheduleChoice) -> set[str]:
    return {member for family in families(choice) for member in family.members()}


def _tried_values(option: Option) -> tuple[WayValue, ...]:
    if option.choices:
        return (option.default, *(choice for choice in option.choices if choice != option.default))
    return TRIED.get(option.name, (option.default,))


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
    return replace(target, kind="cuda").machine(world_size)


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
        strange = [each.way for each in tuning.times if not is_in_search_space(each.way, choices, configs)]
        if tuning.key != key or strange or not tuning.times:
            raise InputError("compiled kernel", f"it names what nobody could have measured: {strange[:1]}", "")
        return tuning

    return read_cached_if_readable(tuning_path(name, key), read, LARGEST_BYTES)


def save_tuning(name: str, measured: TunedTimes) -> None:
    """Save a tuning for later processes. Warns if it cannot be written."""
    save_file(tuning_path(name, measured.key), lambda: encode(measured))


def _schedules_and_movers(way: KernelWay) -> tuple[str, ...]:
    parts = ((word for word in how.split()[1:] if word.startswith("mover=")) for _, how in way.exchanges)
    names = (how.split()[0] for _, how in way.exchanges)
    return tuple(" ".join((name, *movers)) for name, movers in zip(names, parts, strict=True))
