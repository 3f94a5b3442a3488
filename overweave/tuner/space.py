"""The space that the tuner searches: every way to compute an operator, as data, and the one function that judges them.

A candidate is a schedule of the catalog with values for its options, or one of torch's own operators, which have no
Schedule and cannot be simulated. The library path stands first: where nothing is quicker, it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import MatmulConfig, Problem
from overweave.ir.words import MOST_PEERS
from overweave.schedules.finished import shapes_of_tiles
from overweave.schedules.forms import messages_obstacle
from overweave.schedules.reduced import norm_obstacle
from overweave.schedules.skinny import skinny_obstacle
from overweave.schedules.templates import MATMUL_REDUCE_SCATTER, REPLACED, REPLACED_OPTIONS, TEMPLATES
from overweave.schedules.tile_shape import (
    BEST,
    FLOAT8_HOPPER,
    FLOAT8_PORTABLE,
    GATED,
    GATED_FLOAT8,
    HALF_PRECISION,
    HOPPER,
    SINGLE_PRECISION,
    Kernel,
    along_k,
    count_tiles,
)
from overweave.tuner.target import DESCRIPTOR_BYTES, Target, kernel_obstacle, tile_options, weights_obstacle

Value = str | int
Options = dict[str, Value]
_Grid = dict[str, tuple[Value, ...]]
SEQUENTIAL, RING_STORED, SCATTER_PULL = "sequential", "ring_stored", "scatter_pull"
# What reduce-scatters are of two ranks.
OF_TWO = {"fused_ring": "scatter sums=epilogue", "scatter_stored": RING_STORED}
STORED = ("scatter_stored", RING_STORED)  # whose tiles store at peers
TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT = "torch.fused", "torch.one_shot", "torch.two_shot"
# torch's own, from symmetric memory, and the operators that each computes.
BY_TORCH = {
    TORCH_FUSED: ("all_gather_matmul", "matmul_reduce_scatter"),
    TORCH_ONE_SHOT: ("matmul_all_reduce",),
    TORCH_TWO_SHOT: ("matmul_all_reduce",),
}
MOST_PACKED_BYTES = 8 << 20  # of a product, or of what is gathered: beyond that latency is no matter
# MEASURED: of 128 rows it takes 1.24 times as long as cuBLAS, in geometric mean over eight layers of decoding; of 64
# 0.97 times, each in its best tiles (benchmarks/results/skinny.h200.2026-11-22.txt).
MOST_SKINNY_ROWS = 64
TILE_ROWS = 128  # of the usual tile: a piece of a shard holds at least one of them


class Candidate(Struct, frozen=True):
    """A schedule by its short name, or one of BY_TORCH, with options in the order of their names."""

    plan: str
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        """As the operators' `plan=` takes it."""
        return " ".join([self.plan, *(f"{name}={value}" for name, value in self.options)])

    @property
    def is_by_torch(self) -> bool:
        """Whether it is an operator of torch's own, without a Schedule."""
        return self.plan in BY_TORCH

    def schedule(self, operator: str) -> str:
        """Its name in the catalog."""
        return self.plan if self.is_by_torch else f"{operator}.{self.plan}"

    def is_fused(self, operator: str) -> bool:
        """Whether one of our tile kernels computes."""
        return not self.is_by_torch and TEMPLATES[self.schedule(operator)].is_fused

    def has_kernels(self, operator: str) -> bool:
        """Whether any kernel of ours runs."""
        return not self.is_by_torch and TEMPLATES[self.schedule(operator)].has_kernels

    def has_messages(self, operator: str) -> bool:
        """Whether what it moves are packed messages."""
        return not self.is_by_torch and TEMPLATES[self.schedule(operator)].has_messages


def candidate(plan: str, options: Options) -> Candidate:
    return Candidate(plan, tuple(sorted(options.items())))


class Family(Struct, frozen=True):
    """All candidates of one schedule: every combination of the values of its options."""

    plan: str
    grid: _Grid = {}

    def members(self) -> Iterator[Candidate]:
        for values in product(*self.grid.values()):
            yield candidate(self.plan, dict(zip(self.grid, values, strict=True)))


_PIECES: _Grid = {"pieces": (1, 2, 4)}
_IN_TWO: _Grid = {"pieces": (2, 1, 4)}  # of which the model can say nothing: two were best, or close to it
_IN_HALVES: _Grid = {"half_tiles": ("on",)}  # a shard of one wave computes nothing while the next one travels
_EARLY: _Grid = {"matmul": ("early",)}
IN_BULK = "bulk_kernel"
_BY_KERNEL: _Grid = {"mover": ("copy_kernel",), "copy_programs": (8, 16, 32)}
SPACE: dict[str, tuple[Family, ...]] = {
    "all_gather_matmul": (
        Family(SEQUENTIAL),
        Family(TORCH_FUSED),
        Family("per_shard"),
        Family("push", _PIECES),
        Family("push", {"pieces": (1, 2), "order": ("all_peers",)}),
        Family("push", {"pieces": (1, 2)} | _IN_HALVES),
        Family("push", {"pieces": (1, 2)} | _BY_KERNEL),
        Family("pull", {"pieces": (1, 2)}),
        Family("gather_packed"),
        Family("gather_packed", {"matmul": ("skinny", "early")}),
    ),
    "matmul_reduce_scatter": (
        Family(SEQUENTIAL),
        Family(TORCH_FUSED),
        Family("per_shard"),
        Family("scatter_packed"),
        Family("scatter_packed", _EARLY),
        Family("scatter", _PIECES | {"own_pieces": (1, 2, 4)}),
        Family("scatter", _PIECES | {"sums": ("epilogue",)}),
        Family("fused_ring", _PIECES),
        Family("scatter_stored", _PIECES | {"order": ("ring", "all_peers")}),
        Family(RING_STORED, _IN_TWO),
        Family("scatter", {"pieces": (1, 2), "own_pieces": (1,)} | _BY_KERNEL),
        Family(SCATTER_PULL, {"pieces": (1, 2), "own_pieces": (1, 2, 4)}),
    ),
    "matmul_all_reduce": (
        Family(SEQUENTIAL),
        Family(TORCH_ONE_SHOT),
        Family(TORCH_TWO_SHOT),
        Family("one_shot_packed"),
        Family("two_shot_packed"),
        Family("one_shot_packed", _EARLY),
        Family("two_shot_packed", _EARLY),
        Family(RING_STORED, _IN_TWO),
        Family("two_shot", {"pieces": (1, 2, 4, 8), "sums": ("kernel", "epilogue")}),
    ),
}


@lru_cache
def candidates(operator: str) -> tuple[Candidate, ...]:
    """The space of an operator, the library path first. Raises InputError for an operator without one."""
    if operator not in SPACE:
        raise InputError(f"tune {operator[:60]}", "there is no such operator", f"Choose one of {', '.join(SPACE)}")
    return tuple(member for family in SPACE[operator] for member in family.members())


def variations(base: Candidate, problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """A candidate with a tile kernel in every tile shape of the GPU's best kernel, of the portable one in its best, and
    with the last tiles of each dealt out along k where the model says that this takes less time; and if a kernel pushes
    by loads and stores, with one that pushes in bulk, of which the model says the same. Nothing for others.

    MEASURED: of 18 problems that were tuned with all shapes of both, the portable kernel was quickest in one, by 1 %,
    and behind by 3 to 25 % in 17, always best in its first shape (the shipped tables of 2026-11-22).
    """
    if target.kind != "cuda" or not base.is_fused(problem.operator) or "half_tiles" in dict(base.options):
        return ()
    kernels: tuple[Kernel, ...] = ("hopper", "portable") if target.is_hopper else ("portable",)
    method = TEMPLATES[base.schedule(problem.operator)].method
    sums = str(dict(base.options).get("sums"))
    first, *others = ([shape.config for shape in shapes_of_tiles(problem, one, method, sums)] for one in kernels)
    tried = [*first, *(config for configs in others for config in configs[:1])]
    pinned = [_pins(config) for config in tried]
    if base.plan not in STORED:
        pinned += [_pins(config) | {"split_k": BEST} for config in tried if _is_dealt_out(config, problem, target)]
    pinned += [{"mover": IN_BULK}] if target.is_hopper and dict(base.options).get("mover") == "copy_kernel" else []
    return tuple(candidate(base.plan, dict(base.options) | pins) for pins in pinned)


def _is_dealt_out(config: MatmulConfig, problem: Problem, target: Target) -> bool:
    """Whether tiles of the last wave had better be, of shards that are equally high."""
    heights = [-(-problem.m // problem.world_size)] * problem.world_size
    tiles = count_tiles(heights, problem.widths, config).tiles
    return along_k(config, tiles, target.sms, problem.k, BEST).split_k > 0


def obstacle(problem: Problem, target: Target, what: Candidate) -> str:
    """Why a candidate cannot, or should not, compute a problem; empty if it can."""
    if what.plan == SEQUENTIAL:
        return ""
    if problem.world_size == 1:
        return "a group of one has nothing to overlap"
    if not problem.m:
        return "there are no rows"
    if what.is_by_torch:
        return _torchs_obstacle(problem, target, what)
    if problem.norm is not None:
        method = TEMPLATES[what.schedule(problem.operator)].method
        why = norm_obstacle(problem, method)
        if why:
            return why
    if what.has_kernels(problem.operator):
        why = kernel_obstacle(problem, target) or (weights_obstacle(problem) if what.is_fused(problem.operator) else "")
        if why:
            return why
        if dict(what.options).get("kernel") == "hopper" and not (target.kind == "cuda" and target.is_hopper):
            return "the hopper kernel needs sm_90"
        if dict(what.options).get("mover") == IN_BULK and target.kind == "cuda" and not target.is_hopper:
            return "copies in bulk need sm_90"
    if what.plan in STORED and problem.world_size - 1 > MOST_PEERS:
        return f"tiles store at {MOST_PEERS} peers at most"
    if (problem.operator, problem.world_size) == (MATMUL_REDUCE_SCATTER, 2) and what.plan in OF_TWO:
        return f"of two ranks it is {OF_TWO[what.plan]}"
    return (
        _packed_obstacle(problem, what)
        or _multiplier_obstacle(problem, target, dict(what.options).get("matmul", "library"))
        or _pieces_obstacle(problem, what)
    )


def is_member(operator: str, what: Candidate) -> bool:
    """Whether the tuner could have tried a candidate: what a file names beyond that is not run."""
    options = dict(what.options)
    if "kernel" in options and options.get("split_k") == BEST:  # pinned with it
        del options["split_k"]
    pins = {name: options.pop(name) for name in _PINNED if name in options}
    if options.get("mover") == IN_BULK and not pins:  # where loads and stores could be
        options["mover"] = "copy_kernel"
    return (
        operator in SPACE and candidate(what.plan, options) in candidates(operator) and (not pins or pins in _ALL_PINS)
    )


def is_replaced(operator: str, what: Candidate) -> bool:
    """Whether a file names a schedule, or an option, that is gone."""
    return f"{operator}.{what.plan}" in REPLACED or any(name in REPLACED_OPTIONS for name, _ in what.options)


def full_options(problem: Problem, target: Target, what: Candidate) -> Options:
    """What the catalog is asked for: the candidate's options over those that every plan takes on a target."""
    return (tile_options(target) if what.is_fused(problem.operator) else {}) | dict(what.options)


def _torchs_obstacle(problem: Problem, target: Target, what: Candidate) -> str:
    if problem.operator not in BY_TORCH[what.plan]:
        return f"{what.plan} is no {problem.operator}"
    if target.kind != "cuda":
        return "torch's fused operators need CUDA" if what.plan == TORCH_FUSED else "torch's all-reduces need CUDA"
    if problem.epilogue.bits or problem.norm:
        return f"torch's operators do no {problem.norm or problem.epilogue}"
    if what.plan != TORCH_FUSED:
        return _all_reduce_obstacle(problem)
    if problem.m % problem.world_size:
        return f"torch's fused operators need rows that divide by {problem.world_size}"
    return ""


def _all_reduce_obstacle(problem: Problem) -> str:
    if problem.dtype not in ("bfloat16", "float32"):
        return "torch's own all-reduces need bf16 or fp32"
    step = DESCRIPTOR_BYTES // ITEMSIZE_BYTES[problem.dtype]
    return f"n={problem.n} must be a multiple of {step}: torch's all-reduces move 16 bytes" if problem.n % step else ""


def _packed_obstacle(problem: Problem, what: Candidate) -> str:
    """Messages of all ranks lie in memory at once, twice, a third larger than their data."""
    if not what.has_messages(problem.operator):
        return ""
    if why := messages_obstacle(problem):
        return why
    columns = problem.k if problem.operator == "all_gather_matmul" else problem.n
    sent_bytes = problem.m * columns * ITEMSIZE_BYTES[problem.moved_dtype]
    if sent_bytes > MOST_PACKED_BYTES:
        return f"{sent_bytes >> 20} MiB are more than packed messages are for, {MOST_PACKED_BYTES >> 20} MiB"
    return ""


def _multiplier_obstacle(problem: Problem, target: Target, matmul: Value) -> str:
    """Why the matmul of few rows cannot, or should not, compute a problem."""
    if matmul == "library":
        return ""
    if problem.m > MOST_SKINNY_ROWS:
        return f"the matmul of few rows is for {MOST_SKINNY_ROWS}: the library's is quicker for more"
    if matmul == "early" and not target.is_hopper:
        return "kernels start early from sm_90 on"
    return skinny_obstacle(problem)


def fitted(problem: Problem, what: Candidate) -> Candidate:
    """The candidate with no more pieces than a shard of the problem has rows of tiles: as it is, or in half as many."""
    most = 1 << (_most_pieces(problem).bit_length() - 1)
    return replace(what, options=tuple((name, min(int(v), most) if name in _CUT else v) for name, v in what.options))


def _most_pieces(problem: Problem) -> int:
    shard = -(-problem.m // problem.world_size)
    return max(1, -(-shard // TILE_ROWS))


def _pieces_obstacle(problem: Problem, what: Candidate) -> str:
    for name, value in what.options:
        if name in _CUT and int(value) > _most_pieces(problem):
            shard = -(-problem.m // problem.world_size)
            return f"{name}={value}: a shard of {shard} rows has fewer rows of tiles"
    return ""


def _pins(config: MatmulConfig) -> Options:
    return {name: getattr(config, name) for name in _PINNED}


_CUT = ("pieces", "own_pieces")
_PINNED = ("kernel", "block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n")
_ALL_SHAPES = (*HALF_PRECISION, *HOPPER, *SINGLE_PRECISION, *FLOAT8_PORTABLE, *FLOAT8_HOPPER)
_ALL_GATED = (each for gated in (*GATED.values(), *GATED_FLOAT8.values()) for each in gated)
_ALL_PINS = [_pins(shape.config) for shape in (*_ALL_SHAPES, *_ALL_GATED)]
