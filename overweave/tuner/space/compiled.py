"""The space of a compiled kernel: which schedule each of its tensors may take, and the constants that it is launched
with.

`all_gather.auto` stands for every `all_gather.*` with values for its options, the library's first. What a schedule
takes is read from its options, so that a new one, or a new mover, is searched from the day it is there.
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
OPEN = (ANY_MOVER, COPY_PROGRAMS)  # of a list by hand
# Tried values of options that are numbers; of others, all choices. An option that is not here stays as it is.
TRIED: dict[str, tuple[int, ...]] = {
    "pieces": (2, 1, 4),
    "own_pieces": (4, 1),
    "col_pieces": (1, 2),
    "lanes": (1, 2),
    "copy_programs": (16, 8, 32),
}
UNTRIED = ("axis", "island")  # what lies where is the caller's knowledge
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
        """The same, but for one tensor."""
        changed = tuple((name, how if name == tensor else words) for name, words in self.exchanges)
        return KernelWay(changed, self.constants)


class ScheduleFamily(Struct, frozen=True):
    """One schedule with all tried values of its options, the defaults first."""

    name: str
    options: tuple[Option, ...]

    @property
    def grid(self) -> dict[str, tuple[WayValue, ...]]:
        """What is tried of each option."""
        return {option.name: _tried(option) for option in self.options}

    @property
    def first(self) -> str:
        return next(self.members())

    def member(self, chosen: Mapping[str, WayValue]) -> str:
        """The schedule with these options, as it is asked for; what is the default is left out, and what means
        nothing beside the others."""
        named = dict(chosen)
        if named.get(MOVER, ENGINE) not in COPYING_KERNELS:
            named.pop("copy_programs", None)
        kept = [f"{o.name}={named[o.name]}" for o in self.options if named.get(o.name, o.default) != o.default]
        return " ".join([self.name, *kept])

    def members(self) -> Iterator[str]:
        """All that a back end can carry; some come more than once."""
        for chosen in product(*self.grid.values()):
            named = dict(zip(self.grid, chosen, strict=True))
            mover = cast("Mover", named.get(MOVER, ENGINE))
            if mover == ENGINE or self.name == BY_HAND or not obstacle(self.name, mover):
                yield self.member(named)


class ExchangeWays(NamedTuple):
    """The ways that differ from one in how a tensor is exchanged: by which schedule of a family."""

    way: KernelWay
    tensor: str
    family: ScheduleFamily

    @property
    def grid(self) -> dict[str, tuple[WayValue, ...]]:
        return self.family.grid

    def member(self, options: Mapping[str, WayValue]) -> KernelWay:
        return self.way.with_exchange(self.tensor, self.family.member(options))


def families(asked: ScheduleChoice) -> tuple[ScheduleFamily, ...]:
    """The schedules that `all_gather.auto` stands for, the library's first; of any other words, themselves.

    Of moves by hand: that list, with the back ends and SMs of what it leaves open. Raises InputError for a collective
    that has no schedule.
    """
    if not isinstance(asked, str):
        return (ScheduleFamily(BY_HAND, OPEN if OPEN_MOVER in movers_in(asked) else ()),)
    if not is_auto(asked):
        return (ScheduleFamily(asked, ()),)
    collective = asked.removesuffix(AUTO)
    named = transports()
    known = [name for name in named if f"{name}_".startswith((f"{collective}.", f"{collective}_"))]
    if not known:
        valid = sorted({name.split(".")[0] + AUTO for name in named})
        raise InputError(f"schedule {asked[:40]!r}", "there is no such collective", f"Use one of {', '.join(valid)}")
    known = sorted(known, key=lambda name: named[name].is_woven)
    if len({named[name].side for name in known}) > 1:
        found = f"{' and '.join(known)} move different things"
        raise InputError(f"schedule {asked[:40]!r}", found, "Name one of them")
    return tuple(
        ScheduleFamily(name, tuple(one for one in named[name].options if one.name not in UNTRIED)) for name in known
    )


def neighbours(way: KernelWay, asked: Mapping[str, ScheduleChoice]) -> Iterator[KernelWay]:
    """What differs from a way in one option of one automatic schedule; who carries it stays."""
    for tensor, how in way.exchanges:
        name, *pairs = how.split()
        family = next(one for one in families(asked[tensor]) if one.name.split()[0] == name)
        given = dict(pair.split("=") for pair in pairs)
        chosen = {one.name: one.parse(given[one.name]) if one.name in given else one.default for one in family.options}
        for option in (name for name in family.grid if name != MOVER):
            changed = (family.member({**chosen, option: value}) for value in family.grid[option])
            yield from (way.with_exchange(tensor, member) for member in changed)


def directed(asked: str, is_read: bool) -> str:
    """An automatic schedule of one side alone: an all-to-all moves other things before a kernel than behind it."""
    both = "all_to_all" + AUTO
    return f"all_to_all.{'receive' if is_read else 'send'}{AUTO}" if asked == both else asked


def asked_as(written: ScheduleChoice, how: str) -> ScheduleChoice:
    """What a way's words ask for: themselves, or a list by hand, of whose moves those left open are settled."""
    if isinstance(written, str):
        return how
    settings = settle(BY_HAND, OPEN, dict(pair.split("=") for pair in how.split()[1:]))
    programs = settings.copy_programs if settings.mover in COPYING_KERNELS else written.copy_programs
    return settled(replace(written, copy_programs=programs), settings.mover)


def is_auto(asked: object) -> bool:
    """Whether a schedule leaves the choice to the tuner."""
    return isinstance(asked, str) and asked.endswith(AUTO) and asked.split() == [asked]


def is_member(way: KernelWay, asked: Mapping[str, ScheduleChoice], configs: tuple[Constants, ...]) -> bool:
    """Whether the tuner could have tried a way: what a file names beyond that is not run."""
    named = dict(way.exchanges)
    return (
        way.constants in configs
        and named.keys() == asked.keys()
        and all(named[tensor] in _all_members(how) for tensor, how in asked.items())
    )


def side_of(asked: ScheduleChoice) -> TransportDirection:
    """Whether a schedule, automatic or not, moves what a kernel reads or writes. Raises InputError."""
    if not isinstance(asked, str):
        return transport_of(asked).side
    return transport_of(families(asked)[0].name).side


def _all_members(asked: ScheduleChoice) -> set[str]:
    return {member for family in families(asked) for member in family.members()}


def _tried(option: Option) -> tuple[WayValue, ...]:
    """The default first, which stands for itself."""
    if option.choices:
        return (option.default, *(choice for choice in option.choices if choice != option.default))
    return TRIED.get(option.name, (option.default,))
