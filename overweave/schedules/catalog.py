"""Every schedule by name: `build(name, problem, options)` fills a template and says how it is realized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import (
    MatmulConfig,
    Plan,
    Problem,
    gate_obstacle,
    numbered,
    shares_obstacle,
    step_obstacle,
)
from overweave.ir.schedule import LIMIT, Buffer, Given, Goal, Queue, Range, Schedule
from overweave.ir.tensors import product
from overweave.schedules import all_gather, all_reduce, reduce_scatter
from overweave.schedules.communication import (
    COMPLETE,
    COPYING_KERNELS,
    ISSUE,
    MAIN,
    PACKED,
    SUMS,
    TILES,
    A,
    B,
    Communication,
    Split,
    W,
    X,
    Y,
    region,
)
from overweave.schedules.compose import Footprint, compose
from overweave.schedules.finished import shapes_of_tiles, with_finished_sums
from overweave.schedules.forms import ALL_GATHER_MATMUL, check_forms, messages_obstacle
from overweave.schedules.mover import carried
from overweave.schedules.options import Settings, settle
from overweave.schedules.realized import realized, sums_shape
from overweave.schedules.reduced import Summing, norm_obstacle
from overweave.schedules.scales import of_partials, with_row_scales
from overweave.schedules.template import Template
from overweave.schedules.templates import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, REPLACED, TEMPLATES
from overweave.schedules.tile_order import tile_orders
from overweave.schedules.tile_shape import BEST, along_k, count_tiles, half_tiles, has_second_wave, tile_shape

MAX_WORLD_SIZE = 1024
_LIBRARY_ALIGNMENT = 16  # rows: pieces of a library matmul start where its vector loads can


def names(operator: str | None = None) -> tuple[str, ...]:
    """The schedules of an operator, or all. Raises InputError for an unknown operator."""
    found = tuple(name for name, template in TEMPLATES.items() if operator in (None, template.operator))
    if not found:
        raise InputError(f"operator {operator}", "unknown", f"Operators: {', '.join(operators())}")
    return found


def operators() -> tuple[str, ...]:
    """The operators that have schedules."""
    return tuple(dict.fromkeys(template.operator for template in TEMPLATES.values()))


def template_of(name: str) -> Template:
    """The template called `name`. Raises InputError that names all."""
    if name in REPLACED:
        raise InputError(f"schedule {name}", "it is gone", f"Use {REPLACED[name]} in its place")
    if name not in TEMPLATES:
        operator = str(name).partition(".")[0]
        own = [known for known in TEMPLATES if known.startswith(f"{operator}.")]
        raise InputError(f"schedule {str(name)[:80]}", "unknown", f"Schedules: {', '.join(own or TEMPLATES)}")
    return TEMPLATES[name]


def build(name: str, problem: Problem, options: Mapping[str, str | int], *, rank: int | None = None) -> Plan:
    """The plan `name` for a problem: a pure function of its arguments, so that all ranks build the same one.

    rank: build only this rank's tile tables (the schedule is always everybody's). None: every rank's.
    Raises InputError for an unknown schedule or option, a value out of range, or a problem that is none.
    """
    template = template_of(name)
    _check(name, template, problem, rank, options)
    settings = settle(name, template.options, options)
    if template.mover:
        settings = replace(settings, mover=template.mover)
    config = _config(problem, template, settings) if template.is_fused else None
    sums = sums_shape(problem, template, settings)
    schedule = SCHEDULES[template.operator](name, problem, template, (settings, config))
    realization = realized(schedule, problem, settings, config, sums)
    tables = tile_orders(schedule, realization, rank)
    return Plan(name=name, problem=problem, schedule=schedule, realization=realization, tile_orders=tables)


def check_problem(asked: str, problem: Problem) -> None:
    """Raises InputError for a problem of which no schedule at all is built."""
    if problem.dtype not in ITEMSIZE_BYTES:
        raise InputError(asked, f"dtype {problem.dtype}", f"Use one of {', '.join(ITEMSIZE_BYTES)}")
    if not 1 <= problem.world_size <= MAX_WORLD_SIZE:
        raise InputError(asked, f"world_size {problem.world_size}", f"Use 1 to {MAX_WORLD_SIZE} ranks")
    if problem.m < 0 or problem.n < 1 or problem.k < 1:
        found = f"m={problem.m} n={problem.n} k={problem.k}"
        raise InputError(asked, found, "m must be at least 0, n and k at least 1: there is nothing to compute without")
    if problem.world_size * max(-(-problem.m // problem.world_size), problem.n, problem.k) > LIMIT:
        raise InputError(asked, "an extent over all ranks needs more than 31 bits", "Split the problem")


def _check(name: str, template: Template, problem: Problem, rank: int | None, options: Mapping[str, str | int]) -> None:
    asked = f"build {name}"
    if problem.operator != template.operator:
        raise InputError(asked, f"the problem is a {problem.operator}", f"Schedules: {_names_for(problem.operator)}")
    check_problem(asked, problem)
    if rank is not None and not 0 <= rank < problem.world_size:
        raise InputError(asked, f"rank {rank} of {problem.world_size}", "Name a rank of the group, or None")
    if template.has_messages and (obstacle := messages_obstacle(problem)):
        raise InputError(asked, obstacle, "Take another plan, such as sequential")
    obstacle = norm_obstacle(problem, template.method) if problem.norm else ""
    if obstacle:
        raise InputError(f"{asked} with {problem.norm}", obstacle, "Take another plan, such as sequential")
    check_forms(asked, problem, template.is_fused)


def _names_for(operator: str) -> str:
    return ", ".join(name for name, template in TEMPLATES.items() if template.operator == operator) or "none"


def _split(problem: Problem, settings: Settings, config: MatmulConfig | None) -> Split:
    """Pieces start at tile boundaries of their shard. What moves is `a` to the matmul, or partials of its result."""
    alignment = config.block_m if config else _LIBRARY_ALIGNMENT
    split = Split(
        rows=problem.m,
        world_size=problem.world_size,
        order=settings.order,
        rotation=settings.rotation,
        pieces=settings.pieces,
        alignment=alignment,
    )
    return carried(split, problem, problem.k if problem.operator == ALL_GATHER_MATMUL else problem.n, settings, config)


def _config(problem: Problem, template: Template, settings: Settings) -> MatmulConfig:
    """The tile shape. Pieces are aligned to tiles, so that what rounds up is each shard."""
    split = Split(rows=problem.m, world_size=problem.world_size)
    shards = [split.shard(rank) for rank in range(problem.world_size)]
    heights = [hi - lo for lo, hi in shards]
    candidates = settings.tiles(shapes_of_tiles(problem, settings.kernel, template.method, settings.sums))
    if settings.half_tiles == "on" or _is_ring_of_one_wave(problem, template, settings.sms):
        candidates = half_tiles(candidates) or candidates
    k = problem.k if settings.split_k == BEST else 0
    config = settings.tile(tile_shape(heights, problem.widths, settings.sms, candidates, k))
    if settings.split_k not in (1, BEST) and shares_obstacle(config):
        raise InputError(f"split_k={settings.split_k}", shares_obstacle(config), "Use split_k=1")
    if settings.split_k != 1:
        tiles = count_tiles(heights, problem.widths, config).tiles
        config = along_k(config, tiles, settings.sms, problem.k, settings.split_k)
    obstacle = gate_obstacle(config, problem.dtype) if problem.epilogue.gate else ""
    if obstacle:
        raise InputError(f"epilogue {problem.epilogue}", obstacle, "Leave the tile shape to overweave")
    obstacle = step_obstacle(config, problem.dtype)
    if obstacle:
        raise InputError(f"block_k={config.block_k} for {problem.dtype}", obstacle, "Leave block_k to overweave")
    return config


def _is_ring_of_one_wave(problem: Problem, template: Template, sms: int) -> bool:
    """Whether each shard's tiles of a ring would all run at once, and be summed and stored at once, too."""
    return template.method == "ring_stored" and not has_second_wave(problem.m, problem.n, problem.world_size, sms)


def _queue(config: MatmulConfig | None) -> Queue:
    """All work of the caller's stream runs in launch order, kernels too: hence each names the other."""
    return Queue(TILES, ISSUE, after=(MAIN,)) if config else Queue(MAIN, COMPLETE, after=(SUMS, PACKED))


_How = tuple[Settings, MatmulConfig | None]


def _all_gather_matmul(name: str, problem: Problem, template: Template, how: _How) -> Schedule:
    """Every rank has its own `b [k, n]`: columns `[rank * n, (rank + 1) * n)` of the whole product are its own.

    Of several weights each has its part of those columns.
    """
    m, n, k, (settings, config) = problem.m, problem.n, problem.k, how
    ranks, widths = range(problem.world_size), problem.widths
    weights = [Buffer(numbered(W, index), k, cols, "input") for index, cols in enumerate(widths)]
    outs = [Buffer(numbered(Y, index), m, cols, "output", problem.out_dtype) for index, cols in enumerate(widths)]
    triples = list(zip(weights, outs, accumulate(widths[:-1], initial=0), strict=True))
    parts = [(rank, b, y, rank * n + before) for rank in ranks for b, y, before in triples]
    split = _split(problem, settings, config)
    communication = all_gather.all_gather(split, k, template.method, settings, problem.returns_gathered)
    if problem.epilogue.scaling == "rows":
        communication = with_row_scales(communication, split, template.method)
    kernel = Footprint(
        queue=_queue(config),
        a=None,
        b=weights[0],
        out=outs[0],
        more=tuple(zip(weights[1:], outs[1:], strict=True)),
        config=config,
        given=tuple(Given(region(b, rank, (0, k)), B, 0, col) for rank, b, _, col in parts),
        goal=tuple(
            Goal(region(y, rank, (0, m)), product(A, B), 0, col, ((0, k),)) for rank, _, y, col in parts if m > 0
        ),
        sms=settings.sms,
    )
    return compose(name, communication, kernel)


def _matmul_reduce_scatter(name: str, problem: Problem, template: Template, how: _How) -> Schedule:
    """Every rank has its part of the reduced axis; see `_partials`."""
    split = _split(problem, how[0], how[1])
    sums = SUMS if template.has_kernels else MAIN
    if how[0].sums == "epilogue":
        if how[0].mover in COPYING_KERNELS:
            found = "tiles that wait for peers could keep the kernel that pushes from its SMs"
            raise InputError(f"sums=epilogue mover={how[0].mover}", found, "Use sums=kernel or mover=copy_engine")
        sums = TILES
    communication = reduce_scatter.reduce_scatter(
        split, problem.n, template.method, _held(problem), sums, how[0].own_pieces
    )
    return _composed(name, communication, problem, how)


def _matmul_all_reduce(name: str, problem: Problem, template: Template, how: _How) -> Schedule:
    """As `_matmul_reduce_scatter`, but every rank gets all of the sum."""
    if problem.world_size * problem.m > LIMIT:
        raise InputError(f"build {name}", "the rows of all partials need more than 31 bits", "Split the problem")
    split = _split(problem, how[0], how[1])
    summing = Summing(how[0].sums, sums_shape(problem, template, how[0]), problem.norm is not None)
    communication = all_reduce.all_reduce(split, problem.n, template.method, _held(problem), summing)
    return _composed(name, communication, problem, how)


def _composed(name: str, communication: Communication, problem: Problem, how: _How) -> Schedule:
    composed = compose(name, _kept(communication, problem), _partials(problem, how))
    return with_finished_sums(composed, problem)


def _kept(communication: Communication, problem: Problem) -> Communication:
    """Partials and their sums in the dtype of the result; and the scales of the products, if rows have any."""
    in_result = (replace(buffer, dtype=buffer.dtype or problem.out_dtype) for buffer in communication.buffers)
    communication = replace(communication, buffers=tuple(in_result))
    if problem.epilogue.scaling != "rows":
        return communication
    return of_partials(communication, problem.m, tuple(first for first, _ in _held(problem)))


def _held(problem: Problem) -> tuple[Range, ...]:
    """The range of the reduced axis that each rank has."""
    return tuple((rank * problem.k, (rank + 1) * problem.k) for rank in range(problem.world_size))


def _partials(problem: Problem, how: _How) -> Footprint:
    """Rank r has columns `[r * k, (r + 1) * k)` of `a` and the same rows of `b`: its part of the reduced axis."""
    m, n, k, (settings, config) = problem.m, problem.n, problem.k, how
    held = _held(problem)
    a, b = Buffer(X, m, k, "input"), Buffer(W, k, n, "input")
    given_a = tuple(Given(region(a, rank, (0, m)), A, 0, part[0]) for rank, part in enumerate(held) if m > 0)
    given_b = tuple(Given(region(b, rank, (0, k)), B, part[0], 0) for rank, part in enumerate(held))
    return Footprint(queue=_queue(config), a=a, b=b, out=None, config=config, given=given_a + given_b, sms=settings.sms)


SCHEDULES: dict[str, Callable[[str, Problem, Template, _How], Schedule]] = {
    ALL_GATHER_MATMUL: _all_gather_matmul,
    MATMUL_REDUCE_SCATTER: _matmul_reduce_scatter,
    MATMUL_ALL_REDUCE: _matmul_all_reduce,
}
