"""The space that the tuner searches: every way to compute an operator, as data, and the one function that judges them.

A candidate is a schedule of the catalog with values for its options, or one of torch's own operators, which have no
Schedule and cannot be simulated. The library path stands first: where nothing is quicker, it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.catalog.finished import shapes_of_tiles
from overweave.schedules.methods.registry import METHODS, REPLACED, REPLACED_OPTIONS, method_of, methods_for
from overweave.schedules.records.needs import CUTS, most_pieces, needs_of, unmet
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.records.record import Grid, Margin, Method, MethodRequest, SettingValue, Stage, combinations
from overweave.schedules.tiles.shape import (
    BEST,
    FLOAT8_HOPPER,
    FLOAT8_PORTABLE,
    GATED,
    GATED_FLOAT8,
    HALF_PRECISION,
    HOPPER,
    SINGLE_PRECISION,
    KernelChoice,
    along_k,
    count_tiles,
)
from overweave.tuner.space.target import Target, tile_options

Options = dict[str, SettingValue]


class Candidate(Struct, frozen=True):
    """A schedule by its short name, or one of OUTSIDE, with options in the order of their names."""

    plan: str
    options: tuple[tuple[str, SettingValue], ...] = ()

    def __str__(self) -> str:
        """As the operators' `plan=` takes it."""
        return " ".join([self.plan, *(f"{name}={value}" for name, value in self.options)])

    @property
    def is_by_torch(self) -> bool:
        """Whether it is an operator of torch's own, without a Schedule."""
        return self.plan in OUTSIDE

    def schedule(self, operator: str) -> str:
        """Its name in the catalog."""
        return self.plan if self.is_by_torch else f"{operator}.{self.plan}"

    def method(self, operator: str) -> Method | None:
        """Its record; None of torch's own."""
        return None if self.is_by_torch else method_of(self.schedule(operator))

    def is_plain(self, operator: str) -> bool:
        """Whether it is the library path."""
        return (method := self.method(operator)) is not None and method.is_plain

    def is_fused(self, operator: str) -> bool:
        """Whether one of our tile kernels computes."""
        return (method := self.method(operator)) is not None and method.is_fused

    def margin(self, problem: Problem) -> Margin:
        """What it must be predicted to gain before it is taken unmeasured."""
        method = self.method(problem.operator)
        return OUTSIDE[self.plan].margin if method is None else method.margin(problem, dict(self.options))


def candidate(plan: str, options: Mapping[str, SettingValue]) -> Candidate:
    return Candidate(plan, tuple(sorted(options.items())))


class MethodFamily(Struct, frozen=True):
    """All candidates of one grid of a method: every combination of the values of its options."""

    plan: str
    grid: Grid = {}

    @property
    def first(self) -> Candidate:
        return next(self.members())

    def member(self, options: Mapping[str, SettingValue]) -> Candidate:
        return candidate(self.plan, options)

    def members(self) -> Iterator[Candidate]:
        return map(self.member, combinations(self.grid))


IN_BULK = "bulk_kernel"


def families(operator: str) -> tuple[MethodFamily, ...]:
    """The space of an operator: what is the library's, then torch's own, then what else has grids. Raises InputError
    for what is no operator.
    """
    record = operator_of(operator, "tune")
    known = [(method, MethodFamily(method.name, grid)) for method in methods_for(operator) for grid in method.grids]
    plain = [family for method, family in known if method.is_plain]
    others = [family for method, family in known if not method.is_plain]
    return (*plain, *(MethodFamily(name) for name in record.baselines if name in OUTSIDE), *others)


def candidates(operator: str) -> tuple[Candidate, ...]:
    """The space of an operator, the library path first. Raises InputError for what is no operator."""
    return _candidates(operator, tuple(METHODS))


def library_path(operator: str) -> Candidate:
    """The library's collective and matmul, one after the other."""
    return candidates(operator)[0]


@lru_cache
def _candidates(operator: str, registered: tuple[str, ...]) -> tuple[Candidate, ...]:
    """registered: the names of all methods, so that what is registered later is offered, too."""
    return tuple(member for family in families(operator) for member in family.members())


def variations(base: Candidate, problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """A candidate with a tile kernel in every tile shape of the GPU's best kernel, of the portable one in its best, and
    with the last tiles of each dealt out along k where the model says that this takes less time; and if a kernel pushes
    by loads and stores, with one that pushes in bulk, of which the model says the same. Nothing for others.

    MEASURED: of 18 problems that were tuned with all shapes of both, the portable kernel was quickest in one, by 1 %,
    and behind by 3 to 25 % in 17, always best in its first shape (the shipped tables of 2026-11-22).
    """
    method = base.method(problem.operator)
    if target.kind != "cuda" or method is None or not method.is_fused or "half_tiles" in dict(base.options):
        return ()
    kernels: tuple[KernelChoice, ...] = ("hopper", "portable") if target.is_hopper else ("portable",)
    sums = str(dict(base.options).get("sums"))
    first, *others = ([shape.config for shape in shapes_of_tiles(problem, one, method.adds, sums)] for one in kernels)
    tried = [*first, *(config for configs in others for config in configs[:1])]
    pinned = [_pins(config) for config in tried]
    if method.takes("split_k"):
        pinned += [_pins(config) | {"split_k": BEST} for config in tried if _is_dealt_out(config, problem, target)]
    pinned += [{"mover": IN_BULK}] if target.is_hopper and dict(base.options).get("mover") == "copy_kernel" else []
    return tuple(candidate(base.plan, dict(base.options) | pins) for pins in pinned)


def _is_dealt_out(config: MatmulConfig, problem: Problem, target: Target) -> bool:
    """Whether tiles of the last wave had better be, of shards that are equally high."""
    heights = [-(-problem.m // problem.world_size)] * problem.world_size
    tiles = count_tiles(heights, problem.widths, config).tiles
    return along_k(config, tiles, target.sms, problem.k, BEST).split_k > 0


def obstacle(problem: Problem, target: Target, what: Candidate, stage: Stage = "choice") -> str:
    """Why a candidate cannot, or at the last stage should not, compute a problem; empty if it can."""
    asked = MethodRequest(problem, dict(what.options), target)
    method = what.method(problem.operator)
    wanted = OUTSIDE[what.plan].needs if method is None else needs_of(method, asked)
    return unmet(asked, wanted, stage)


def is_member(operator: str, what: Candidate) -> bool:
    """Whether the tuner could have tried a candidate: what a file names beyond that is not run."""
    options = dict(what.options)
    if "kernel" in options and options.get("split_k") == BEST:  # pinned with it
        del options["split_k"]
    pins = {name: options.pop(name) for name in _PINNED if name in options}
    if "groups" in options:  # of any problem's waves (tuner/space/waves.py)
        method = METHODS.get(f"{operator}.{what.plan}")
        return method is not None and method.takes("groups") and options.keys() == {"groups", "library_sms"}
    if options.get("mover") == IN_BULK and not pins:  # where loads and stores could be
        options["mover"] = "copy_kernel"
    return (
        operator in OPERATORS
        and candidate(what.plan, options) in candidates(operator)
        and (not pins or pins in _ALL_PINS)
    )


def is_replaced(operator: str, what: Candidate) -> bool:
    """Whether a file names a schedule, or an option, that is gone."""
    return f"{operator}.{what.plan}" in REPLACED or any(name in REPLACED_OPTIONS for name, _ in what.options)


def full_options(problem: Problem, target: Target, what: Candidate) -> Options:
    """What the catalog is asked for: the candidate's options over those that every plan takes on a target."""
    method = what.method(problem.operator)
    return (tile_options(target, method) if method and method.is_fused else {}) | dict(what.options)


def fitted(problem: Problem, what: Candidate) -> Candidate:
    """The candidate with no more pieces than a shard of the problem has rows of tiles: as it is, or in half as many."""
    most = 1 << (most_pieces(problem).bit_length() - 1)
    return replace(what, options=tuple((name, min(int(v), most) if name in CUTS else v) for name, v in what.options))


def _pins(config: MatmulConfig) -> Options:
    return {name: getattr(config, name) for name in _PINNED}


_PINNED = ("kernel", "block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n")
_ALL_SHAPES = (*HALF_PRECISION, *HOPPER, *SINGLE_PRECISION, *FLOAT8_PORTABLE, *FLOAT8_HOPPER)
_ALL_GATED = (each for gated in (*GATED.values(), *GATED_FLOAT8.values()) for each in gated)
_ALL_PINS = [_pins(shape.config) for shape in (*_ALL_SHAPES, *_ALL_GATED)]
