"""What campaigns go over, in one place: the plans of every operator, read from the records of methods.

A campaign filters these plans. A method that the tuner offers, or that adds, is here as soon as it is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overweave.ir.operators.registry import OPERATORS as RECORDS
from overweave.ir.plan import COPY_KERNEL, LIBRARY, TILE_KERNEL
from overweave.schedules.methods.registry import METHODS, methods_for
from overweave.schedules.records.record import Method

# Operators of shards and sums; those that exchange blocks have campaigns of their own.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = OPERATORS = tuple(
    name for name, record in RECORDS.items() if not record.exchanges
)
HOPPER, PORTABLE = "kernel=hopper", "kernel=portable"
# Tiles that differ in what a kernel does with them: rectangles and their number, stages, waves that end in quarters.
TILES = tuple(
    f"{HOPPER} {shape}"
    for shape in (
        "block_m=128 block_n=192 split_n=3 stages=4",
        "block_m=128 block_n=256 split_n=4 stages=3 sms=24",
        "block_m=128 block_n=160 stages=5 sms=24",
        "block_m=64 block_n=256 split_n=1 stages=4",
    )
)


class Named(NamedTuple):
    """A plan of an operator, as a caller names it."""

    operator: str
    plan: str

    @property
    def method(self) -> Method:
        """The record of its method."""
        return METHODS[f"{self.operator}.{self.plan.split()[0]}"]

    @property
    def full_name(self) -> str:
        """As the catalog has the method."""
        return self.method.full_name

    @property
    def options(self) -> dict[str, int | str]:
        """What the plan asks beside its method."""
        pairs = (pair.partition("=") for pair in self.plan.split()[1:])
        return {name: int(value) if value.isdigit() else value for name, _, value in pairs}

    def with_words(self, words: str) -> Named:
        """The plan that asks for more."""
        return self._replace(plan=f"{self.plan} {words}".rstrip())


def offered(method: Method) -> bool:
    """Whether the tuner offers it, or it has a way to add that nobody offers, or is a point that its source drops."""
    return bool(method.grids or method.adds or method.dropped)


OFFERED = tuple(Named(method.operator, method.name) for method in METHODS.values() if offered(method))
# Every method as it is; and those of all-to-alls.
PLAIN = tuple(one for one in OFFERED if one.operator in OPERATORS)
EXCHANGED = tuple(one for one in OFFERED if RECORDS[one.operator].exchanges)


def engines(of: Named) -> Iterator[Named]:
    """A method by all engines that can move and add for it. Kernels that copy beside few tiles leave SMs to sums."""
    method, few = of.method, "sms=1" if of.method.adds else ""
    yield of.with_words(few if COPY_KERNEL in method.moves else "")
    if method.takes("mover"):
        yield of.with_words(f"mover=copy_kernel {few}")
    if method.takes("sums"):
        yield of.with_words("sums=epilogue")


# What runs long, comes late, and meets faults: all that is not a library's alone, by every engine.
BY_ENGINES = tuple(one for plain in PLAIN if not plain.method.is_plain for one in engines(plain))
# What moves by collectives of the library beside matmuls: they have its deadline, and are enqueued one by one.
BY_COLLECTIVES = tuple(plain.with_words("carrier=library") for plain in PLAIN if plain.method.takes("carrier"))


def plans_by_island(operator: str, stays_inside: bool = True) -> list[str]:
    """The plans of an operator that reach peers of their own island alone, the library moving rows where it can; or all
    others."""
    found = []
    for method in methods_for(operator):
        options = {"carrier": LIBRARY} if method.takes("carrier") else {}
        if method.crosses_islands(options) is not stays_inside:
            found.append(" ".join([method.name, *(f"{name}={value}" for name, value in options.items())]))
    return found


def in_kernels(of: Named, kernels: tuple[str, ...] = (HOPPER, PORTABLE)) -> Iterator[Named]:
    """A plan in tile kernels; as it is, if it has none."""
    return (of.with_words(kernel) for kernel in (kernels if of.method.is_fused else ("",)))


# Every method by every engine in every kernel: what may follow a product is checked in them.
IN_KERNELS = tuple(
    each
    for plain in PLAIN
    for one in (engines(plain) if plain.method.is_fused else (plain,))
    for each in in_kernels(one)
)


# Beside these, options that change what a kernel of fp8 does.
OF_FP8 = (Named(REDUCE_SCATTER, f"scatter {HOPPER} own_pieces=2"),)


def shaped(of: Named) -> Iterator[Named]:
    """A plan in tiles of several shapes: of every shape where tiles add, and otherwise of two."""
    method, options = of.method, of.options
    yield of
    if method.is_fused and "mover" not in options:
        adds = (method.adds is not None and method.adds.by == TILE_KERNEL) or options.get("sums") == "epilogue"
        free = of._replace(plan=of.plan.removesuffix(" sms=1"))
        yield free.with_words(f"{'pieces=1 ' * method.takes('pieces')}{PORTABLE}")
        for index, tiles in enumerate(TILES if adds else TILES[:2]):
            yield free.with_words(tiles if index or not method.takes("pieces") else f"pieces=4 {tiles}")
        if method.takes("library_sms"):  # of few SMs tiles have several waves
            yield from (free.with_words(f"library_sms=120 {kernel}") for kernel in (HOPPER, PORTABLE))


def every_plan(operator: str) -> tuple[str, ...]:
    """The plans of an operator: by every engine, in tiles of several shapes, in another order."""
    own = [plain for plain in PLAIN if plain.operator == operator]
    found = [one for plain in own for by in engines(plain) for one in shaped(by)]
    found += [one for one in BY_COLLECTIVES if one.operator == operator]
    movers = f"mover=copy_kernel {PORTABLE}", "mover=copy_kernel copy_programs=4 pieces=4 order=all_peers"
    pushed = (plain for plain in own if plain.method.grids and plain.method.takes("mover"))
    found += [plain.with_words(words) for plain in pushed for words in movers]
    return tuple(dict.fromkeys(one.plan for one in found))
