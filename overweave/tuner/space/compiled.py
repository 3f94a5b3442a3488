"""The search space of an author's compiled kernel: the schedules of each of its tensors, and the constants of its
launch.

`all_gather.auto` stands for every `all_gather.*` with values for its options, the library's first. The options of a
schedule come from its record, so a newly registered schedule or mover is searched too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.schedules.communication import COPYING_KERNELS, Mover
from overweave.schedules.moves.moves import AUTO as OPEN_MOVER
from overweave.schedules.moves.moves import movers_in, settled
from overweave.schedules.records.options import ANY_MOVER, COPY_PROGRAMS, Option, settle
from overweave.schedules.weave.transports import ScheduleChoice, TransportDirection, obstacle, transport_of, transports

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


def is_member(way: KernelWay, choices: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...]) -> bool:
    """Whether the tuner could have tried a way: a file's other ways are not run."""
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
    """Return the tried values of an option, the default first."""
    if option.choices:
        return (option.default, *(choice for choice in option.choices if choice != option.default))
    return TRIED.get(option.name, (option.default,))
