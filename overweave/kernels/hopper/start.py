"""Prologue of the Hopper matmul: starts slow memory accesses before barriers are initialised.

The first tile claim, the tensor maps and table rows are requested at once, and arrive while mbarriers are initialised
and partitions start; in a launch of one or two waves nothing else hides that time. The first tile is claimed from the
work counter and not the program's number, because another library may hold SMs for a while, and running programs must
take the tiles in table order. Each program prefetches the table row of its own number, so that whoever claims it hits
L2: between two calls operands may have evicted the table.
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
# Prefetches name kernel parameters as tested Triton versions number them; with others no tensor map is prefetched.
KNOWS_PARAMETERS = gl.constexpr(is_tested())
FETCH_ASSEMBLY = gl.constexpr(tuple(fetch_tensor_maps(KERNEL, maps) for maps in range(2 * MOST_WEIGHTS + 3)))


@gluon.jit
def start_claim(claims):
    """Start the atomic add that claims the first tile. `send_claim` waits for the result, which thread 0 gets."""
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.inline_asm_elementwise(CLAIM_ASSEMBLY, "=r,l,r", [claims, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_row(table):
    """Prefetch the table row of this program's number into L2: the cache lines of its first and last word."""
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row_ends = table + gl.program_id(0) * COLUMNS + (threads & 1) * (COLUMNS - 1)
    operands = [row_ends, (threads < 2).to(gl.int32)]
    gl.inline_asm_elementwise(FETCH_ROW_ASSEMBLY, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_claim():
    """Allocate shared memory by which one partition passes the first claim to the producer: (slot, mbarrier).

    Slots have 64 bits: of 32 the compiler makes a matrix store, and keeps its addresses in registers that consumers
    need.
    """
    slot = gl.allocate_shared_memory(gl.int64, [32 * gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sent = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(sent.index(0), count=1)
    return slot, sent


@gluon.jit
def send_claim(claimed, claim):
    """Consumer 0: wait for the claim that it started, store it for the producer, and arrive on the mbarrier."""
    claim.slot.store(claimed.to(gl.int64))
    fence_async_shared()  # not for this value: a shared store ahead of any bulk store needs the fence
    mbarrier.arrive(claim.sent.index(0), count=1)


@gluon.jit
def send_claim_traced(claimed, claim, queue, start_ns):
    """`send_claim`, and trace the first tile: when the program began, and when its partitions had started."""
    partitions_ns = read_clock()
    send_claim(claimed, claim)
    threads = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    is_tile = (threads == 0) & (claimed < queue.tiles)
    gl.store(queue.trace + claimed * TRACE_COLUMNS + BEGUN, start_ns, mask=is_tile)
    gl.store(queue.trace + claimed * TRACE_COLUMNS + PARTED, partitions_ns, mask=is_tile)


@gluon.jit
def receive_claim(claim):
    """Producer: wait for the first claim; return its row of the tile table."""
    mbarrier.wait(claim.sent.index(0), 0)
    return gl.max(claim.slot.slice(0, 1).load(gl.BlockedLayout([1], [32], [1], [0])), 0).to(gl.int32)


@gluon.jit
def fetch_maps(MAPS: gl.constexpr):
    """Prefetch the tensor maps of the kernel's first MAPS arguments into the descriptor cache."""
    if KNOWS_PARAMETERS:
        gl.inline_asm_elementwise(FETCH_ASSEMBLY[MAPS], "=r", [], dtype=gl.int32, is_pure=False, pack=1)
