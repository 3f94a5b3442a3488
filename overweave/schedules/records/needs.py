"""What methods need of a problem and of a device, each said once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from overweave.ir.dtype import FLOAT8, ITEMSIZE_BYTES
from overweave.ir.epilogue import MOST_NORM_COLS, NO_EPILOGUE
from overweave.ir.exchange import NO_REACH
from overweave.ir.plan import LIBRARY, MOST_PACKED_RANKS, MOST_PEERS, MOST_WEIGHTS, REDUCE_KERNEL, TILE_KERNEL, Engine
from overweave.ir.problem import Problem
from overweave.schedules.communication import COPYING_KERNELS
from overweave.schedules.records import needs
from overweave.schedules.records.options import TILE_SHAPE
from overweave.schedules.records.record import ENDED_BY_OWNER, Method, MethodRequest, Need, Stage
from overweave.schedules.tiles.shape import DTYPES

DESCRIPTOR_BYTES = 16  # rows of bulk tensors, and of what kernels load at once, start at multiples of this
# Of a product, or of what is gathered; beyond that latency is no matter. MEASURED: on four H200s packed messages
# of 16 MiB are the quickest, or up to 10 % behind, and of 32 MiB behind the library, or close to it
# (small_weighed.*.h200x4.2026-11-28); on two nothing beyond 8 MiB was timed.
MOST_PACKED_BYTES, MOST_AMONG_FOUR = 8 << 20, 16 << 20
# MEASURED: of 128 rows it takes 1.24 times as long as cuBLAS, in geometric mean over eight layers of decoding; of 64
# 0.97 times, each in its best tiles (benchmarks/results/skinny.h200.2026-11-22.txt).
MOST_SKINNY_ROWS = 64
TILE_ROWS = 128  # of the usual tile: a piece of a shard holds at least one of them
CUTS = ("own_pieces", "pieces")  # options that say in how many pieces a shard is moved, or summed
ORDERS_OF_OWNERS = {"epilogue": ENDED_BY_OWNER[TILE_KERNEL]}  # by the option `sums`


def _several(asked: MethodRequest) -> str:
    if asked.problem.world_size == 1:
        return "a group of one has nothing to overlap"
    return "" if asked.problem.m else "there are no rows"


def _rows_of_kernels(asked: MethodRequest) -> str:
    """Why our kernels cannot, or should not, read a problem's rows."""
    problem = asked.problem
    if asked.device is None:
        return ""
    if problem.dtype == "float32" and asked.device.kind == "cuda":
        return "fp32 without TF32 runs outside the tensor cores, where the library's matmul is faster"
    if problem.dtype == FLOAT8 and asked.device.kind == "cuda":
        if not asked.device.is_hopper:
            return "the tile kernels multiply fp8 on sm_90 only"
        if problem.out_dtype == "float32":
            return "the tile kernels keep products of fp8 in 16 bits: tiles of 32 would not fit beside the operands"
    step = DESCRIPTOR_BYTES // ITEMSIZE_BYTES[problem.dtype]
    if problem.k % step or any(width % step for width in problem.widths):
        found = f"n={problem.n_text} and k={problem.k} must be multiples of {step}"
        return f"{found}: rows must start at multiples of 16 bytes"
    return ""


def _few_weights(asked: MethodRequest) -> str:
    count = len(asked.problem.widths)
    return f"there are {count} weights, and a tile kernel takes {MOST_WEIGHTS}" if count > MOST_WEIGHTS else ""


def _few_peers(asked: MethodRequest) -> str:
    return f"tiles store at {MOST_PEERS} peers at most" if asked.problem.world_size - 1 > MOST_PEERS else ""


def _packable(asked: MethodRequest) -> str:
    problem = asked.problem
    if problem.world_size > MOST_PACKED_RANKS:
        return f"packed messages serve {MOST_PACKED_RANKS} ranks at most"
    travels = problem.record.gathers and problem.world_size > 1
    return "packed messages carry no scales of rows" if problem.epilogue.scaling == "rows" and travels else ""


def _few_bytes(asked: MethodRequest) -> str:
    """Messages of all ranks lie in memory at once, twice, a third larger than their data."""
    problem = asked.problem
    sent_bytes = problem.m * problem.moved_columns * ITEMSIZE_BYTES[problem.moved_dtype]
    most_bytes = MOST_PACKED_BYTES if problem.world_size < 4 else MOST_AMONG_FOUR
    if sent_bytes > most_bytes:
        return f"{sent_bytes >> 20} MiB are more than packed messages are for, {most_bytes >> 20} MiB"
    return ""


def _hopper(what: str, kinds: tuple[str, ...]) -> Need:
    """kinds: of devices that are asked for sm_90."""

    def why(asked: MethodRequest) -> str:
        is_asked = asked.device is not None and asked.device.kind in kinds
        is_there = asked.device is not None and asked.device.kind == "cuda" and asked.device.is_hopper
        return f"{what} sm_90" if is_asked and not is_there else ""

    return Need("choice", why)


def _bare_halves(asked: MethodRequest) -> str:
    problem = asked.problem
    if problem.dtype not in DTYPES:
        return f"the matmul of few rows multiplies numbers of 16 bits, not {problem.dtype}"
    if problem.product_epilogue != NO_EPILOGUE:
        return f"the matmul of few rows ends without {problem.product_epilogue}"
    return ""


def _few_rows(asked: MethodRequest) -> str:
    if asked.problem.m > MOST_SKINNY_ROWS:
        return f"the matmul of few rows is for {MOST_SKINNY_ROWS}: the library's is quicker for more"
    return ""


def _whole_blocks(asked: MethodRequest) -> str:
    found = "a tile kernel multiplies whole blocks, and counts fill them in part"
    return "" if asked.problem.has_fixed_sizes else found


def _known_sizes(asked: MethodRequest) -> str:
    found = "a collective lands pieces whose sizes are known when the plan is built, and counts change them"
    return "" if asked.problem.has_fixed_sizes else found


def _peer_memory(asked: MethodRequest) -> str:
    if asked.device is None or asked.device.peer_access:
        return ""
    return f"{asked.device.parted or 'the GPUs'} {NO_REACH}"


def _island_memory(asked: MethodRequest) -> str:
    device = asked.device
    if device is None or not device.parted:
        return _peer_memory(asked)
    return "" if device.island_access else f"the GPUs of an island {NO_REACH}"


def _tuned_kernels(asked: MethodRequest) -> str:
    if asked.device is None or asked.device.kind != "cuda" or asked.device.has_tuned_kernels:
        return ""
    return "no kernel of ours is tuned for such a GPU: `overweave calibrate` measures how fast ours are there"


def _far_pairs(asked: MethodRequest) -> str:
    """On a switch, or a mesh, whoever passes rows on takes the link by which their owner could have sent them."""
    device = asked.device
    if device is None or device.kind != "cuda" or device.has_far_pairs or asked.problem.islands:
        return ""
    return "all pairs of GPUs are joined alike: rows come no sooner by way of a third one"


def _several_islands(asked: MethodRequest) -> str:
    if asked.problem.islands:
        return "the islands of the group count, not those of an option" if "island" in asked.options else ""
    is_by_library = asked.options.get("carrier", LIBRARY) == LIBRARY
    return "all ranks are one island, where nothing needs the library" if is_by_library else ""


def _starts_early(asked: MethodRequest) -> str:
    return "" if asked.device is None or asked.device.is_hopper else "kernels start early from sm_90 on"


def _plain_parts(asked: MethodRequest) -> str:
    epilogue = asked.problem.epilogue.of_each_part
    if epilogue.scaling == "rows":
        return "products of columns are added as they are, without scales of rows"
    return (
        "" if epilogue == epilogue.part_epilogue else f"products of columns are added before anything like {epilogue}"
    )


def _no_residual(asked: MethodRequest) -> str:
    found = "products of several ranks' pieces are scattered to their rows, where the residual lies, once they end"
    return found if asked.problem.epilogue.reads_rows else ""


def _no_row_scales(asked: MethodRequest) -> str:
    found = "one matmul of several ranks' pieces has rows in another order than their scales"
    return found if asked.problem.epilogue.scaling == "rows" else ""


def _sums_beside_pushes(asked: MethodRequest) -> str:
    mover = asked.options.get("mover")
    found = "tiles that wait for peers could keep the kernel that pushes from its SMs: use sums=kernel"
    return f"sums=epilogue mover={mover}: {found}, or mover=copy_engine" if mover in COPYING_KERNELS else ""


def _sums_of_whole_rows(asked: MethodRequest) -> str:
    found = "a tile holds no whole row to norm: use sums=kernel"
    return f"sums=epilogue: {found}" if asked.problem.of_rows and asked.problem.record.scatters else ""


def most_pieces(problem: Problem) -> int:
    """How many pieces a shard of the problem has rows of tiles for."""
    return max(1, -(-_shard_rows(problem) // TILE_ROWS))


def _shard_rows(problem: Problem) -> int:
    return -(-problem.m // problem.world_size)


def _full_pieces(asked: MethodRequest) -> str:
    for name in CUTS:
        if int(asked.options.get(name, 1)) > most_pieces(asked.problem):
            rows = _shard_rows(asked.problem)
            return f"{name}={asked.options[name]}: a shard of {rows} rows has fewer rows of tiles"
    return ""


def of_norms(engine: Engine | None, is_fused: bool) -> Need:
    """engine: which norms rows, if any does. is_fused: whether tiles of a kernel multiply."""

    def why(asked: MethodRequest) -> str:
        problem = asked.problem
        if problem.of_rows is None:
            return ""
        if engine is None:
            return "its last step does not norm"
        if engine != LIBRARY and problem.n > MOST_NORM_COLS:
            return f"rows of {problem.n} columns are more than the {MOST_NORM_COLS} of a tile"
        if (engine == REDUCE_KERNEL or is_fused) and problem.world_size == 1:
            return "in a group of one there is no sum whose rows could be normed"
        return ""

    return Need("schedule", why)


def from_ranks(fewest: int, instead: str) -> Need:
    """Of fewer ranks a method is the same as another one, by its name and options."""

    def why(asked: MethodRequest) -> str:
        return f"of two ranks it is {instead}" if asked.problem.world_size < fewest else ""

    return Need("choice", why)


def most_ranks(most: int) -> Need:
    """Of more ranks a method is not for the choice to take."""

    def why(asked: MethodRequest) -> str:
        ranks = asked.problem.world_size
        return f"it is for {most} ranks at most, and there are {ranks}" if ranks > most else ""

    return Need("choice", why)


def _unscaled(asked: MethodRequest) -> str:
    found = asked.problem.epilogue.part_epilogue.steps
    return "tiles that store block by block multiply without scales or epilogues of parts" if found else ""


def of_batches(varies_with_rows: str) -> Need:
    """Of a call whose bits of a row must not depend on the number of rows, where the setting asks for that.

    varies_with_rows: why a method's do; empty where they do not. Options that shape tiles would give calls of other
    rows other tiles: these are one for all rows (`fixed_tiles`).
    """

    def why(asked: MethodRequest) -> str:
        if not asked.problem.batch_invariant:
            return ""
        if found := varies_with_rows or ORDERS_OF_OWNERS.get(str(asked.options.get("sums")), ""):
            return f"not batch-invariant: {found}"
        shaped = [name for name in (*TILE_SHAPE, "half_tiles") if name in asked.options]
        return f"not batch-invariant: {shaped[0]}= shapes tiles, and all calls have the same" if shaped else ""

    return Need("schedule", why)


SEVERAL, FULL_PIECES = Need("choice", _several), Need("choice", _full_pieces)
TUNED_KERNELS, FAR_PAIRS = Need("choice", _tuned_kernels), Need("choice", _far_pairs)
ALIGNED, PEER_ACCESS = Need("device", _rows_of_kernels), Need("device", _peer_memory)
ISLAND_ACCESS = Need("device", _island_memory)
WHOLE_BLOCKS = Need("schedule", _whole_blocks)
FEW_WEIGHTS = Need("schedule", _few_weights)
PLAIN_PARTS = Need("schedule", _plain_parts)
NO_RESIDUAL, NO_ROW_SCALES = Need("schedule", _no_residual), Need("schedule", _no_row_scales)
LEVELS = (FAR_PAIRS, Need("choice", _several_islands))  # of methods by islands
FEW_PEERS = Need("choice", _few_peers)
UNSCALED = Need("schedule", _unscaled)
PACKABLE = (Need("schedule", _packable), Need("choice", _few_bytes))
_SKINNY = (Need("choice", _few_rows), Need("schedule", _bare_halves))
# Of the values of options.
OF_VALUES: dict[tuple[str, str | int], tuple[Need, ...]] = {
    ("kernel", "hopper"): (_hopper("the hopper kernel needs", ("cpu", "cuda")),),
    ("mover", "bulk_kernel"): (_hopper("copies in bulk need", ("cuda",)),),
    ("carrier", "library"): (Need("schedule", _known_sizes),),
    ("sums", "epilogue"): (Need("schedule", _sums_beside_pushes), Need("schedule", _sums_of_whole_rows)),
    ("matmul", "skinny"): _SKINNY,
    ("matmul", "early"): (_SKINNY[0], Need("choice", _starts_early), _SKINNY[1]),
}


# The one statement of validity: why a method cannot, or should not, compute a problem.

STAGES: tuple[Stage, ...] = get_args(Stage)


def obstacle(asked: MethodRequest, method: Method, stage: Stage = "choice") -> str:
    """What stands against a method, the first thing found; empty if nothing does.

    stage: what to ask for: what any device refuses; also what this one does; also what another method does better.
    """
    return unmet(asked, needs_of(method, asked), stage)


def unmet(asked: MethodRequest, needs: Iterable[Need], stage: Stage) -> str:
    """What the first need says that is asked for and not met; empty if all are met."""
    asking = STAGES[: STAGES.index(stage) + 1]
    return next((why for need in needs if need.stage in asking and (why := need.why(asked))), "")


def needs_of(method: Method, asked: MethodRequest) -> Iterator[Need]:
    """All that a method needs: by its engines, by what is asked of it, and of its own."""
    if not method.is_plain:
        yield needs.SEVERAL
    yield needs.of_norms(method.norms, method.is_fused)
    yield needs.of_batches(method.varies_with_rows)
    if method.has_kernels:
        yield needs.ALIGNED
        yield needs.TUNED_KERNELS
    if method.is_fused:
        yield needs.FEW_WEIGHTS
    if method.crosses_islands(asked.options):
        yield needs.PEER_ACCESS
    elif method.addresses_peers(asked.options):
        yield needs.ISLAND_ACCESS
    if TILE_KERNEL in method.moves:
        yield needs.FEW_PEERS
    yield from method.needs
    if method.has_messages:
        yield from needs.PACKABLE
    for option in asked.options.items():
        yield from needs.OF_VALUES.get(option, ())
    if not method.is_plain:
        yield needs.FULL_PIECES
