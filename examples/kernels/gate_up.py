"""The first half of a gated feed-forward layer: silu(x @ gate) * (x @ up), both products in one kernel."""

import triton
import triton.language as tl


@triton.jit
def silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def gate_up_kernel(
    x,
    gate,
    up,
    out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [M, N] of x [M, K], gate [K, N], up [K, N], all row-major."""
    # @overweave.axis M block=BLOCK_M
    # @overweave.axis N block=BLOCK_N
    # @overweave.dispatch begin
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    # @overweave.dispatch end
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gated = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    lifted = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        # @overweave.load X=x[M, K]
        tile = tl.load(
            x + rows[:, None] * K + depth[None, :], mask=(rows[:, None] < M) & (depth[None, :] < K), other=0.0
        )
        inside = (depth[:, None] < K) & (cols[None, :] < N)
        # @overweave.load G=gate[K, N]
        g = tl.load(gate + depth[:, None] * N + cols[None, :], mask=inside, other=0.0)
        # @overweave.load U=up[K, N]
        u = tl.load(up + depth[:, None] * N + cols[None, :], mask=inside, other=0.0)
        gated = tl.dot(tile, g, gated)
        lifted = tl.dot(tile, u, lifted)
    result = silu(gated) * lifted
    place = out + rows[:, None] * N + cols[None, :]
    # @overweave.store OUT=out[M, N]
    tl.store(place, result.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))
