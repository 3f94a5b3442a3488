"""How a program of the Hopper matmul begins: what takes a round trip to memory is under way before its barriers are.

The first claim, the tensor maps and rows of the table are asked for at once, and come while barriers are made and
partitions start. In a launch of one or two waves of tiles that is time which nothing else hides. It stays a claim,
where a program's number would be known sooner: rows go out to programs that run, and another library may hold SMs for a
while. So each program fetches one row, of its number, and whoever claims it finds it in the L2 cache: between two calls
operands may have driven the table out of that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from overweave.compat.triton_names import is_tested
from overweave.ir.plan import MOST_WEIGHTS
from overweave.lang.tile_table import BEGUN, COLUMNS, PARTED, TRACE_COLUMNS, read_clock
from overweave.memory.device.ptx import CLAIM_IN_THREAD_0, PREFETCH_TO_L2, fetch_tensor_maps

KERNEL = "matmul_hopper_kernel"
CLAIM_ASSEMBLY = gl.constexpr(CLAIM_IN_THREAD_0)
FETCH_ROW_ASSEMBLY = gl.constexpr(PREFETCH_TO_L2)
# Parameters are called and counted as those versions do: with another one no map is fetched early.
KNOWS_PARAMETERS = gl.constexpr(is_tested())
FETCH_ASSEMBLY = gl.constexpr(tuple(fetch_tensor_maps(KERNEL, maps) for maps in range(2 * MOST_WEIGHTS + 3)))


@gluon.jit
def begin_claim(claims):
    """The first claim, under way: what comes is thread 0's, for `pass_claim`."""
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.inline_asm_elementwise(CLAIM_ASSEMBLY, "=r,l,r", [claims, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_row(table):
    """Has the row of the table that has the program's number brought to the L2 cache: the lines of both its ends."""
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ends = table + gl.program_id(0) * COLUMNS + (threads & 1) * (COLUMNS - 1)
    operands = [ends, (threads < 2).to(gl.int32)]
    gl.inline_asm_elementwise(FETCH_ROW_ASSEMBLY, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def place_for_claim():
    """Where the first claim is passed on, and the mbarrier that says so.

    In 64 bits: of 32 the compiler makes a matrix store, and keeps its addresses in registers that consumers need.
    """
    place = gl.allocate_shared_memory(gl.int64, [32 * gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    passed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(passed.index(0), count=1)
    return place, passed


@gluon.jit
def pass_claim(claimed, claim):
    """Whoever began the claim, in its partition: waits for it, and passes it on."""
    claim.place.store(claimed.to(gl.int64))
    fence_async_shared()  # nothing bulk reads it, but who stores to shared memory ahead of bulk stores owes a fence
    mbarrier.arrive(claim.passed.index(0), count=1)


@gluon.jit
def pass_claim_traced(claimed, claim, queue, begun):
    """The same; and, of the program's first tile, when the program began, and when its partitions had started."""
    parted = read_clock()
    pass_claim(claimed, claim)
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    is_tile = (threads == 0) & (claimed < queue.tiles)
    gl.store(queue.trace + claimed * TRACE_COLUMNS + BEGUN, begun, mask=is_tile)
    gl.store(queue.trace + claimed * TRACE_COLUMNS + PARTED, parted, mask=is_tile)


@gluon.jit
def receive_claim(claim):
    """Producer: the row of the table that was claimed first."""
    mbarrier.wait(claim.passed.index(0), 0)
    return gl.max(claim.place.slice(0, 1).load(gl.BlockedLayout([1], [32], [1], [0])), 0).to(gl.int32)


@gluon.jit
def fetch_maps(MAPS: gl.constexpr):
    """Has the tensor maps of the kernel's first MAPS arguments brought to where bulk loads and stores look for them."""
    if KNOWS_PARAMETERS:
        gl.inline_asm_elementwise(FETCH_ASSEMBLY[MAPS], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
