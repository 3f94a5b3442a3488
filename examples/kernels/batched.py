"""A batched matmul, [Z, M, K] @ [Z, K, N], over a three-dimensional grid."""

import triton
import triton.language as tl


@triton.jit
def batched_kernel(
    a,
    b,
    c,
    Z,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c [Z, M, N], all row-major."""
    # @overweave.axis Z block=1
    # @overweave.axis M block=BLOCK_M
    # @overweave.axis N block=BLOCK_N
    # @overweave.dispatch begin
    # @overweave.pid_map Z=batch M=pid_m N=pid_n
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    batch = tl.program_id(2)
    # @overweave.dispatch end
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_batch = a + batch.to(tl.int64) * M * K
    b_batch = b + batch.to(tl.int64) * K * N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        in_depth = depth < K
        # @overweave.load A=a[Z, M, K]
        left = tl.load(
            a_batch + rows[:, None] * K + depth[None, :], mask=(rows[:, None] < M) & in_depth[None, :], other=0.0
        )
        # @overweave.load B=b[Z, K, N]
        right = tl.load(
            b_batch + depth[:, None] * N + cols[None, :], mask=in_depth[:, None] & (cols[None, :] < N), other=0.0
        )
        total = tl.dot(left, right, total)
    place = c + batch.to(tl.int64) * M * N + rows[:, None] * N + cols[None, :]
    # @overweave.store C=c[Z, M, N]
    tl.store(place, total.to(c.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))
