"""The search space: every way to compute an operator, as data, and the function that checks whether one can run.

A candidate is a schedule of the catalog with values for its options, or one of torch's own operators, which have no
Schedule and cannot be simulated. The library path is first: it is taken if nothing is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.plan import MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.catalog.realized import shapes_of_tiles
from overweave.schedules.methods.registry import METHODS, REPLACED, REPLACED_OPTIONS, method_of, methods_for
from overweave.schedules.records.needs import CUTS, most_pieces, needs_of, unmet
from overweave.schedules.records.options import settle
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.records.record import Grid, Margin, Method, MethodRequest, SettingValue, Stage, combinations
from overweave.schedules.tiles.shape import (
    FLOAT8_HOPPER,
    FLOAT8_PORTABLE,
    GATED,
    GATED_FLOAT8,
    HALF_PRECISION,
    HOPPER,
    SINGLE_PRECISION,
    KernelChoice,
)
from overweave.tuner.space.target import Target, tile_options

Options = dict[str, SettingValue]
LONGEST_WORDS = 80  # of a caller's, in an error


class Candidate(Struct, frozen=True):
    """A schedule by its short name, or one of OUTSIDE, with options in the order of their names."""

    plan: str
    options: tuple[tuple[str, SettingValue], ...] = ()

    def __str__(self) -> str:
        """Return the text that the operators' `plan=` takes."""
        return " ".join([self.plan, *(f"{name}={value}" for name, value in self.options)])

    @property
    def is_by_torch(self) -> bool:
        """Whether it is one of torch's own operators, without a Schedule."""
        return self.plan in OUTSIDE

    def schedule(self, operator: str) -> str:
        """Return its name in the catalog."""
        return self.plan if self.is_by_torch else f"{operator}.{self.plan}"

    def method(self, operator: str) -> Method | None:
        """Return its record; None for torch's own operators."""
        return None if self.is_by_torch else method_of(self.schedule(operator))

    def is_plain(self, operator: str) -> bool:
        """Whether it is the library path."""
        return (method := self.method(operator)) is not None and method.is_plain

    def is_fused(self, operator: str) -> bool:
        """Whether one of our tile kernels computes."""
        return (method := self.method(operator)) is not None and method.is_fused

    def margin(self, problem: Problem) -> Margin:
        """Return what it must be predicted to gain before it is taken unmeasured."""
        method = self.method(problem.operator)
        return OUTSIDE[self.plan].margin if method is None else method.margin(problem, dict(self.options))


def candidate(plan: str, options: Mapping[str, SettingValue]) -> Candidate:
    return Candidate(plan, tuple(sorted(options.items())))


def candidate_of(operator: str, words: str) -> Candidate:
    """Return what words such as `push pieces=4` ask of an operator: a plan by its short or full name, and its options
    as they were written.

    Raises InputError for what cannot be read, a schedule that is unknown, and options or values that it has not.
    """
    name, *pairs = words.split() or [""]
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            shown = option[:LONGEST_WORDS]
            found = f"{shown} is given twice" if separator else f"{shown!r} is no option"
            raise InputError(f"plan {words[:LONGEST_WORDS]!r}", found, "Write NAME option=value ...")
        options[option] = value
    asked = candidate(name.removeprefix(f"{operator}."), options)
    if not asked.is_by_torch:
        full = asked.schedule(operator)
        settle(full, method_of(full).options, options)
    return asked


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


BULK_MOVER = "bulk_kernel"


def families(operator: str) -> tuple[MethodFamily, ...]:
    """Return the space of an operator: the library path, torch's operators, then all other methods with grids. Raises
    InputError for an unknown operator."""
    record = operator_of(operator, "tune")
    methods = [(method, MethodFamily(method.name, grid)) for method in methods_for(operator) for grid in method.grids]
    plain = [family for method, family in methods if method.is_plain]
    others = [family for method, family in methods if not method.is_plain]
    return (*plain, *(MethodFamily(name) for name in record.baselines if name in OUTSIDE), *others)


def candidates(operator: str) -> tuple[Candidate, ...]:
    """Return the space of an operator, the library path first. Raises InputError for an unknown operator."""
    return _candidates(operator, tuple(METHODS))


def library_path(operator: str) -> Candidate:
    """Return the candidate that runs the collective and the matmul in sequence, by NCCL and cuBLAS."""
    return candidates(operator)[0]


@lru_cache
def _candidates(operator: str, registered: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Return `candidates`. registered: the names of all methods, so that a later registration is not cached away."""
    return tuple(member for family in families(operator) for member in family.members())


def variations(base: Candidate, problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """Return the variations of a candidate with a tile kernel; none for other candidates.

    These are every tile shape of the GPU's best kernel, the best shape of the portable one, and, if a kernel pushes by
    loads and stores, bulk pushes, of which the model predicts the same. MEASURED: of 18 problems that were tuned with
    all shapes of both, the portable kernel was quickest in one, by 1 %, and behind by 3 to 25 % in 17, always best in
    its first shape (the shipped tables of 2026-11-22).
    """
    method = base.method(problem.operator)
    if target.kind != "cuda" or method is None or not method.is_fused or "half_tiles" in dict(base.options):
        return ()
    kernels: tuple[KernelChoice, ...] = ("hopper", "portable") if target.is_hopper else ("portable",)
    sums = str(dict(base.options).get("sums"))
    first, *others = ([shape.config for shape in shapes_of_tiles(problem, one, method.adds, sums)] for one in kernels)
    tried = [*first, *(config for configs in others for config in configs[:1])]
    pinned = [_pins(config) for config in tried]
    pinned += [{"mover": BULK_MOVER}] if target.is_hopper and dict(base.options).get("mover") == "copy_kernel" else []
    return tuple(candidate(base.plan, dict(base.options) | pins) for pins in pinned)


def reason_unsupported(problem: Problem, target: Target, candidate: Candidate, stage: Stage = "choice") -> str:
    """Return why a candidate cannot (at the last stage: should not) compute a problem; "" if it can."""
    request = MethodRequest(problem, dict(candidate.options), target)
    method = candidate.method(problem.operator)
    needs = OUTSIDE[candidate.plan].needs if method is None else needs_of(method, request)
    return unmet(request, needs, stage)


def is_member(operator: str, tried: Candidate) -> bool:
    """Whether the tuner could have tried a candidate: a file's other candidates are not run."""
    options = dict(tried.options)
    pins = {name: options.pop(name) for name in _PINNED if name in options}
    if "groups" in options:  # of any problem's waves (tuner/space/waves.py)
        method = METHODS.get(f"{operator}.{tried.plan}")
        return method is not None and method.takes("groups") and options.keys() == {"groups", "library_sms"}
    if options.get("mover") == BULK_MOVER and not pins:  # where loads and stores could be
        options["mover"] = "copy_kernel"
    return (
        operator in OPERATORS
        and candidate(tried.plan, options) in candidates(operator)
        and (not pins or pins in _ALL_PINS)
    )


def is_removed(operator: str, candidate: Candidate) -> bool:
    """Whether a candidate of a file names a schedule, or an option, that was removed."""
    return f"{operator}.{candidate.plan}" in REPLACED or any(name in REPLACED_OPTIONS for name, _ in candidate.options)


def full_options(problem: Problem, target: Target, candidate: Candidate) -> Options:
    """Return the options for the catalog: the candidate's over those of every plan on the target."""
    method = candidate.method(problem.operator)
    return (tile_options(target, method) if method and method.is_fused else {}) | dict(candidate.options)


def limit_pieces(problem: Problem, candidate: Candidate) -> Candidate:
    """Return the candidate with at most as many pieces as a shard of the problem has rows of tiles, rounded to a power
    of 2."""
    most = 1 << (most_pieces(problem).bit_length() - 1)
    return replace(
        candidate, options=tuple((name, min(int(v), most) if name in CUTS else v) for name, v in candidate.options)
    )


def _pins(config: MatmulConfig) -> Options:
    return {name: getattr(config, name) for name in _PINNED}


_PINNED = ("kernel", "block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n")
_ALL_SHAPES = (*HALF_PRECISION, *HOPPER, *SINGLE_PRECISION, *FLOAT8_PORTABLE, *FLOAT8_HOPPER)
_ALL_GATED = (each for gated in (*GATED.values(), *GATED_FLOAT8.values()) for each in gated)
_ALL_PINS = [_pins(shape.config) for shape in (*_ALL_SHAPES, *_ALL_GATED)]
