"""Every schedule by name: `build(name, problem, options)` fills a template and says how it is realized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from itertools import product as product_of

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import operator_of
from overweave.ir.operators.registry import register as register_record
from overweave.ir.plan import COPY_ENGINE, LIBRARY, MatmulConfig, Plan, gate_obstacle, indexed_name, step_obstacle
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT, Buffer, Credit, Goal, InitialContents, Operation, Queue, Range, Schedule
from overweave.ir.tensors import product
from overweave.schedules.catalog.compose import MatmulFootprint, compose, with_finished_sums
from overweave.schedules.catalog.forms import check_forms
from overweave.schedules.catalog.realized import realized, shapes_of_tiles, sums_shape
from overweave.schedules.catalog.scales import of_partials, with_row_scales
from overweave.schedules.communication import (
    COMPLETE,
    GATHERED,
    ISSUE,
    MAIN,
    PACKED,
    SUMS,
    TILES,
    A,
    B,
    Communication,
    MatmulChunk,
    Split,
    W,
    X,
    Y,
    gathered_by_library,
    region,
)
from overweave.schedules.methods.registry import METHODS, method_of, methods_for
from overweave.schedules.methods.registry import register as register_method
from overweave.schedules.moves.transfers import OWN
from overweave.schedules.records.movers import carried
from overweave.schedules.records.needs import PLAIN_PARTS, obstacle
from overweave.schedules.records.options import Settings, settle
from overweave.schedules.records.record import Method, MethodInputs, MethodRequest
from overweave.schedules.tiles.order import tile_orders
from overweave.schedules.tiles.shape import fixed_tiles, half_tiles, has_second_wave, tile_shape

MAX_WORLD_SIZE = 1024
GATHERED_WEIGHT = "gathered_w"  # a buffer: all rows of a weight that ranks have shards of
LIBRARY_ALIGNMENT = 16  # rows: pieces of a library matmul start where its vector loads can


def names(operator: str | None = None) -> tuple[str, ...]:
    """The schedules of an operator, or all. Raises InputError for an unknown operator."""
    if operator is None:
        return tuple(METHODS)
    operator_of(operator)
    return tuple(method.full_name for method in methods_for(operator))


def register(record: Operator, methods: Sequence[Method], builder: Builder | None = None) -> None:
    """From now on there is an operator with these methods, whose schedules `builder` fills; None: by what travels.

    Raises InputError for a record that cannot be served.
    """
    asked = f"register {record.name}"
    if builder is None:
        for field, is_served, cure in _served(record):
            if not is_served:
                raise InputError(asked, f"{field} is {getattr(record, field)}", f"{cure}, or pass a builder of its own")
        for method in methods:
            if method.write is None:
                raise InputError(asked, f"{method.full_name} has no moves", "Set its write, or pass a builder")
    for method in methods:
        if method.operator != record.name:
            raise InputError(asked, f"{method.full_name} is another operator's", f"Set operator={record.name!r}")
    register_record(record)
    for method in methods:
        register_method(method)
    if builder is not None:
        _BUILDERS[record.name] = builder


def _served(record: Operator) -> Iterator[tuple[str, bool, str]]:
    """Field by field, whether a builder of this file serves it, and what it could be instead."""
    x, w, y = ((each.ownership, each.along) for each in (record.x, record.w, record.y))
    if record.gathers_weight:
        forms = record.forms
        is_bare = not forms.several_weights and all(form.allowed_by == "returns_gathered" for form in forms.allowed)
        yield "x", x == ("gathered", "m"), "Gather its rows, along m"
        yield "w", w == ("gathered", "k"), "Gather its rows, along k"
        yield "y", y == ("replicated", None), "Make it replicated: every rank multiplies the same"
        yield "forms", is_bare and not forms.several_products, "Leave all but returns_gathered out"
        yield "dual", record.dual is None, "Leave it out: there are no gradients"
    elif record.gathers and not record.exchanges:
        yield "x", x[1] == "m", "Gather its rows, along m"
        yield "w", w in (("sharded", "n"), ("replicated", None)), "Let ranks have shards along n, or all of it"
        yield "y", y == (w if w[0] == "sharded" else ("replicated", None)), "Let ranks have the columns of w"
    elif record.exchanges:
        yield "w", w == ("sharded", "n"), "Let ranks have shards along n"
        is_sent = x == ("exchanged", None) and y == ("sharded", "n")
        yield "x", is_sent or (x == ("sharded", None) and y == ("exchanged", None)), "Exchange x, or y, alone"
    else:
        yield "y", y in (("summed", "m"), ("summed", None)), "Sum it, along m or everywhere"
        yield "x", x == ("sharded", "k"), "Let ranks have shards along k"
        yield "w", w == ("sharded", "k"), "Let ranks have shards along k"


def build(
    name: str,
    problem: Problem,
    options: Mapping[str, str | int],
    *,
    rank: int | None = None,
    only: tuple[int, ...] = (),
) -> Plan:
    """The plan `name` for a problem: a pure function of its arguments, so that all ranks build the same one.

    rank: build only this rank's tile tables (the schedule is always everybody's). None: every rank's. only: the ranks
    whose operations are written, for a simulation that takes others to do the same; (): all, as whatever runs needs.
    Raises InputError for an unknown schedule or option, a value out of range, or a problem that is none.
    """
    method = method_of(name)
    _check(method, problem, rank, options)
    if PLAIN_PARTS in method.needs:
        problem = replace(problem, epilogue=problem.epilogue.of_each_part)
    settings = _with_carriers(settle(name, method.options, options), method, problem)
    config = _config(problem, method, settings) if method.is_fused else None
    if settings.rows == "cyclic" and config is not None:
        problem = replace(problem, strip=config.block_m)
    sums, split = sums_shape(problem, method, settings), replace(_split(problem, settings, config), only=only)
    work = MethodInputs(problem, settings, config, split, sums, _held(problem), method)
    schedule = _of_ranks(_builder(problem.record)(work), only)
    if problem.islands:
        schedule = replace(schedule, credits=tuple(_inside(problem.islands, schedule.credits)))
    if not problem.has_fixed_sizes:
        sides = _COUNTED if problem.record.exchanges else {Y: "received"} if problem.record.gathers else {}
        buffers = (replace(each, counted=each.counted or sides.get(each.name)) for each in schedule.buffers)
        schedule = replace(schedule, buffers=tuple(buffers))
    realization = realized(schedule, problem, method, settings, config, sums)
    if clash := {*problem.beside, *problem.also_made} & {buffer.name for buffer in schedule.buffers}:
        raise InputError(f"build {name} with {min(clash)}=", "a buffer of the plan has this name", "Name it otherwise")
    tables = tile_orders(schedule, realization, only if rank is None else (rank,))
    return Plan(name=name, problem=problem, schedule=schedule, realization=realization, tile_orders=tables)


def _with_carriers(settings: Settings, method: Method, problem: Problem) -> Settings:
    """The settings, with who carries chunks where the method or the problem says so: of a method on two levels what
    crosses between islands, beside tiles that leave an SM at least; of others all that moves."""
    if method.mover:
        settings = replace(settings, mover=method.mover)
    if not method.has_levels:
        return replace(settings, mover=LIBRARY) if settings.carrier == LIBRARY else settings
    carrier = settings.carrier if method.takes("carrier") else LIBRARY
    carrier = carrier or (LIBRARY if problem.islands else COPY_ENGINE)
    return replace(settings, carrier=carrier, library_sms=max(1, settings.library_sms))


def _of_ranks(schedule: Schedule, only: tuple[int, ...]) -> Schedule:
    """The schedule without the operations of other ranks, where not all are asked for."""
    if not only:
        return schedule
    kept = set(only)
    return replace(
        schedule,
        credits=tuple(each for each in schedule.credits if {each.giver, each.taker} <= kept),
        given=tuple(each for each in schedule.given if each.region.rank in kept),
        goal=tuple(each for each in schedule.goal if each.region.rank in kept),
        operations=tuple(each for each in schedule.operations if each.rank in kept),
    )


def _inside(islands: Iterable[tuple[int, ...]], credits: Iterable[Credit]) -> Iterator[Credit]:
    """The credits between ranks of one island: no other rank touches their memory."""
    island = {rank: ranks for ranks in islands for rank in ranks}
    return (credit for credit in credits if credit.taker in island[credit.giver])


def matmul_config(name: str, problem: Problem, options: Mapping[str, str | int]) -> MatmulConfig:
    """The tile shape of a method with a tile kernel, without its schedule. Raises InputError."""
    method = method_of(name)
    return _config(problem, method, settle(name, method.options, options))


def check_problem(asked: str, problem: Problem) -> None:
    """Raises InputError for a problem of which no schedule at all is built."""
    if problem.dtype not in ITEMSIZE_BYTES:
        raise InputError(asked, f"dtype {problem.dtype}", f"Use one of {', '.join(ITEMSIZE_BYTES)}")
    if not 1 <= problem.world_size <= MAX_WORLD_SIZE:
        raise InputError(asked, f"world_size {problem.world_size}", f"Use 1 to {MAX_WORLD_SIZE} ranks")
    if problem.m < 0 or problem.n < 1 or problem.k < 1:
        found = f"m={problem.m} n={problem.n} k={problem.k}"
        raise InputError(asked, found, "m must be at least 0, n and k at least 1: there is nothing to compute without")
    if problem.m != problem.record.whole_rows(problem.m, problem.world_size):
        found = f"{problem.m} rows are no whole blocks for {problem.world_size} ranks"
        raise InputError(asked, found, "Pad the rows to a multiple of the ranks")
    if problem.islands and sorted(chain(*problem.islands)) != list(range(problem.world_size)):
        found = f"islands of ranks {problem.islands} of {problem.world_size}"[:80]
        raise InputError(asked, found, "Name every rank once, in one island")
    if problem.world_size * max(-(-problem.m // problem.world_size), problem.n, problem.k) > LIMIT:
        raise InputError(asked, "an extent over all ranks needs more than 31 bits", "Split the problem")


def _check(method: Method, problem: Problem, rank: int | None, options: Mapping[str, str | int]) -> None:
    asked = f"build {method.full_name}"
    if problem.operator != method.operator:
        own = ", ".join(other.full_name for other in methods_for(problem.operator))
        raise InputError(asked, f"the problem is a {problem.operator}", f"Schedules: {own or 'none'}")
    check_problem(asked, problem)
    if rank is not None and not 0 <= rank < problem.world_size:
        raise InputError(asked, f"rank {rank} of {problem.world_size}", "Name a rank of the group, or None")
    check_forms(asked, problem)
    if found := obstacle(MethodRequest(problem, options), method, "schedule"):
        norm = f" with {problem.of_rows}" if problem.of_rows else ""
        raise InputError(f"{asked}{norm}", found, "Take another plan, such as sequential")


def _split(problem: Problem, settings: Settings, config: MatmulConfig | None) -> Split:
    """Pieces start at tile boundaries of their shard. What moves is `a` to the matmul, or partials of its result."""
    alignment = config.block_m if config else LIBRARY_ALIGNMENT
    split = Split(
        rows=problem.m,
        world_size=problem.world_size,
        order=settings.order,
        rotation=settings.rotation,
        pieces=settings.pieces,
        alignment=alignment,
    )
    return carried(split, problem, problem.moved_columns, settings, config)


def _config(problem: Problem, method: Method, settings: Settings) -> MatmulConfig:
    """The tile shape. Pieces are aligned to tiles, so that what rounds up is each shard."""
    split = Split(rows=problem.m, world_size=problem.world_size)
    shards = [split.shard(rank) for rank in range(problem.world_size)]
    heights = [hi - lo for lo, hi in shards]
    candidates = settings.tiles(shapes_of_tiles(problem, settings.kernel, method.adds, settings.sums))
    if problem.batch_invariant:
        return fixed_tiles(problem.widths, settings.sms, candidates, problem.k)
    # Tiles of a ring of one wave would all run at once, and be summed and stored at once, too.
    is_one_wave = not has_second_wave(problem.m, problem.n, problem.world_size, settings.sms)
    if settings.half_tiles == "on" or (method.stores_round_a_ring and is_one_wave):
        candidates = half_tiles(candidates) or candidates
    config = settings.tile(tile_shape(heights, problem.widths, settings.sms, candidates, problem.k))
    obstacle = gate_obstacle(config, problem.dtype) if problem.epilogue.products > 1 else ""
    if obstacle:
        raise InputError(f"epilogue {problem.epilogue}", obstacle, "Leave the tile shape to overweave")
    obstacle = step_obstacle(config, problem.dtype)
    if obstacle:
        raise InputError(f"block_k={config.block_k} for {problem.dtype}", obstacle, "Leave block_k to overweave")
    return config


def _queue(config: MatmulConfig | None) -> Queue:
    """All work of the caller's stream runs in launch order, kernels too: hence each names the other."""
    return Queue(TILES, ISSUE, after=(MAIN,)) if config else Queue(MAIN, COMPLETE, after=(SUMS, PACKED))


Builder = Callable[[MethodInputs], Schedule]
# Blocks that a call's counts fill in part, by the buffers that hold them.
_COUNTED = {X: "sent", OWN: "sent", GATHERED: "received", Y: "received"}
_BUILDERS: dict[str, Builder] = {}  # of the operators that were registered


def _builder(record: Operator) -> Builder:
    """What builds the schedules of an operator: by what travels."""
    if record.name in _BUILDERS:
        return _BUILDERS[record.name]
    if record.gathers:
        return _gather_then_matmul
    return _matmul_then_exchange if record.exchanges else _matmul_then_sum


def _gather_then_matmul(work: MethodInputs) -> Schedule:
    """Of several weights each rank has, of each, its shard: a part of the rank's columns of the whole product."""
    problem = work.problem
    m, k, record, config = problem.m, problem.k, problem.record, work.config
    ranks, widths = work.split.ranks, problem.widths
    own = [Buffer(indexed_name(W, at), _longest(problem), cols, "input") for at, cols in enumerate(widths)]
    gathered = record.gathers_weight and problem.world_size > 1
    weights = [Buffer(GATHERED_WEIGHT, k, cols, "local") for cols in widths] if gathered else own
    outs = [Buffer(indexed_name(Y, index), m, cols, "output", problem.out_dtype) for index, cols in enumerate(widths)]
    triples = list(zip(own, outs, accumulate(widths[:-1], initial=0), strict=True))
    parts = [(rank, b, y, problem.start(record.w, rank)[1] + before) for rank in ranks for b, y, before in triples]
    communication, whole = _written(work), (((0, m), ((0, k),)),) if m > 0 else ()
    if problem.epilogue.scaling == "rows":
        communication = with_row_scales(communication, work.split, work.method.moves[0])
    if gathered:
        communication = _with_weight(communication, problem, own[0], weights[0])
    kernel = MatmulFootprint(
        queue=_queue(config),
        a=None,
        b=weights[0],
        out=outs[0],
        more=tuple(zip(weights[1:], outs[1:], strict=True)),
        config=config,
        given=tuple(
            InitialContents(region(b, rank, (0, hi - lo)), B, lo, col)
            for rank, b, _, col in parts
            for lo, hi in (problem.weight_rows(rank),)
            if lo < hi
        ),
        goal=tuple(
            Goal(region(y, rank, rows), product(problem.factor(rank), B), rows[0], col, terms)
            for rank, _, y, col in parts
            for rows, terms in communication.parts.get(rank, whole)
        ),
        sms=work.settings.sms,
    )
    return compose(work.method.full_name, communication, kernel, work.split.only)


def _longest(problem: Problem) -> int:
    lo, hi = problem.weight_rows(0)
    return hi - lo


def _with_weight(made: Communication, problem: Problem, own: Buffer, whole: Buffer) -> Communication:
    """The same, all of the weight brought to every rank by the library, before anything that the rank does."""
    split, begun, steps = (
        Split(rows=problem.k, world_size=problem.world_size),
        set[int](),
        list[Operation | MatmulChunk](),
    )
    for step in made.steps:
        if step.rank not in begun:
            lo, hi = split.shard(step.rank)
            steps.append(gathered_by_library(split, region(own, step.rank, (0, hi - lo)), whole, "all_gather_weight"))
        begun.add(step.rank)
        steps.append(step)
    return replace(made, steps=tuple(steps), queues=(*made.queues, *_main(made)), buffers=(*made.buffers, own))


def _main(made: Communication) -> tuple[Queue, ...]:
    """The caller's stream, where nothing of the moves stands there yet."""
    return () if any(queue.name == MAIN for queue in made.queues) else (Queue(MAIN, COMPLETE, after=(TILES,)),)


def _matmul_then_sum(work: MethodInputs) -> Schedule:
    """Every rank has its part of the reduced axis; see `_partials`."""
    problem = work.problem
    if problem.record.shares_sums and problem.world_size * problem.m > LIMIT:
        raise InputError(
            f"build {work.method.full_name}", "the rows of all partials need more than 31 bits", "Split the problem"
        )
    communication = _kept(_written(work), work)
    return with_finished_sums(compose(work.method.full_name, communication, _partials(work), work.split.only), problem)


def _matmul_then_exchange(work: MethodInputs) -> Schedule:
    """Every rank has a block of rows for each rank, whose products by its weight go there."""
    problem, config = work.problem, work.config
    block, n, k, ranks = problem.block, problem.n, problem.k, range(problem.world_size if problem.m else 0)
    own = work.split.ranks if problem.m else ()
    a, b = Buffer(X, problem.m, k, "input"), Buffer(W, k, n, "input")
    given = []
    for rank, to in product_of(own, ranks):
        rows = region(a, rank, (to * block, (to + 1) * block))
        given.append(InitialContents(rows, problem.factor(to), rank * block, 0))
    given += [InitialContents(region(b, rank, (0, k)), B, 0, rank * n) for rank in work.split.ranks]
    y, goal = Buffer(Y, problem.m, n, "output"), []
    for rank, source in product_of(own, ranks):
        rows, made = region(y, rank, (source * block, (source + 1) * block)), product(problem.factor(rank), B)
        goal.append(Goal(rows, made, source * block, source * n, ((0, k),)))
    kernel = MatmulFootprint(
        queue=_queue(config), a=a, b=b, out=None, config=config, given=tuple(given), sms=work.settings.sms
    )
    return compose(work.method.full_name, replace(_written(work), goal=tuple(goal)), kernel, work.split.only)


def _written(work: MethodInputs) -> Communication:
    assert work.method.write is not None, f"{work.method.full_name} has neither moves nor a builder"
    return work.method.write(work)


def _kept(communication: Communication, work: MethodInputs) -> Communication:
    """Partials and their sums in the dtype of the result; and the scales of the products, if rows have any."""
    problem = work.problem
    in_result = (replace(buffer, dtype=buffer.dtype or problem.out_dtype) for buffer in communication.buffers)
    communication = replace(communication, buffers=tuple(in_result))
    if problem.epilogue.scaling != "rows":
        return communication
    return of_partials(communication, problem.m, tuple(first for first, _ in work.held))


def _held(problem: Problem) -> tuple[Range, ...]:
    """The range of the reduced axis that each rank has."""
    return tuple((rank * problem.k, (rank + 1) * problem.k) for rank in range(problem.world_size))


def _partials(work: MethodInputs) -> MatmulFootprint:
    """Each rank's part of the reduced axis: columns of `a`, and the same rows of `b`."""
    problem, config = work.problem, work.config
    m, n, k, record = problem.m, problem.n, problem.k, problem.record
    a, b, ranks = Buffer(X, m, k, "input"), Buffer(W, k, n, "input"), work.split.ranks
    given_a = tuple(
        InitialContents(region(a, rank, (0, m)), A, *problem.start(record.x, rank)) for rank in ranks if m > 0
    )
    given_b = tuple(InitialContents(region(b, rank, (0, k)), B, *problem.start(record.w, rank)) for rank in ranks)
    return MatmulFootprint(
        queue=_queue(config), a=a, b=b, out=None, config=config, given=given_a + given_b, sms=work.settings.sms
    )
