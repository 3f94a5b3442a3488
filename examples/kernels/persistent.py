"""A persistent matmul with tensor descriptors made on the host: every program walks tiles at its own stride."""

import triton
import triton.language as tl


@triton.jit
def tile_of(tile_id, num_pid_m, num_pid_n, GROUP_M: tl.constexpr):
    """The row and column of a tile, grouped for the L2 cache."""
    num_pid_in_group = GROUP_M * num_pid_n
    group_id = tile_id // num_pid_in_group
    first_pid_m = group_id * GROUP_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_M)
    pid_m = first_pid_m + (tile_id % group_size_m)
    pid_n = (tile_id % num_pid_in_group) // group_size_m
    return pid_m, pid_n


@triton.jit
def persistent_kernel(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
):
    """C = A @ B.T, [M, K] @ [N, K].T."""
    # @overweave.axis M block=BLOCK_M
    # @overweave.axis N block=BLOCK_N
    start_pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    # @overweave.tile_id persistent
    for tile_id in tl.range(start_pid, num_pid_m * num_pid_n, NUM_SMS, flatten=True):
        # @overweave.dispatch begin
        # @overweave.pid_map M=pid_m N=pid_n
        pid_m, pid_n = tile_of(tile_id, num_pid_m, num_pid_n, GROUP_M)
        # @overweave.dispatch end
        offs_am = pid_m * BLOCK_M
        offs_bn = pid_n * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for depth in range(0, K, BLOCK_K):
            # @overweave.load A=a_desc[M, K]
            a = a_desc.load([offs_am, depth])
            # @overweave.load B=b_desc[N, K]
            b = b_desc.load([offs_bn, depth])
            accumulator = tl.dot(a, b.T, accumulator)
        # @overweave.store C=c_desc[M, N]
        c_desc.store([offs_am, offs_bn], accumulator.to(c_desc.dtype))
