"""Public matmuls: of groups, gated, rotated, in fp8 blocks, persistent, batched, convolving, of weights of 4 bits."""

import triton
import triton.language as tl


@triton.jit
def grouped_matmul(x_ptr, w_ptr, y_ptr, T, R, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # @overweave.axis T block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map T=pm N=pn
    pm = pid % tl.cdiv(T, BM)
    pn = pid // tl.cdiv(T, BM)
    # @overweave.dispatch end
    group = pm * BM // R
    rows = pm * BM + tl.arange(0, BM)
    cols = pn * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    w_ptrs = w_ptr + group * K * N + ks[:, None] * N + cols[None, :]
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        # @overweave.load X=x_ptr[T, K]
        x = tl.load(x_ptrs, mask=(rows[:, None] < T) & (k + ks[None, :] < K), other=0.0)
        w = tl.load(w_ptrs, mask=(k + ks[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
        x_ptrs += BK
        w_ptrs += BK * N
    # @overweave.store Y=y_ptr[T, N]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < T) & (cols[None, :] < N))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def geglu_matmul(
    a_ptr, w_ptr, c_ptr, M, N, K, stride_am, stride_wk, stride_cm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    # @overweave.axis M block=BLOCK_M
    # @overweave.axis N block=BLOCK_N
    # @overweave.tile_id
    pid = tl.program_id(axis=0)
    # @overweave.dispatch begin
    width = GROUP_M * tl.cdiv(N, BLOCK_N)
    group_id = pid // width
    group_size = tl.minimum(tl.cdiv(M, BLOCK_M) - group_id * GROUP_M, GROUP_M)
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = group_id * GROUP_M + (pid % group_size)
    pid_n = (pid % width) // group_size
    # @overweave.dispatch end
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ram = tl.max_contiguous(tl.multiple_of(rm % M, BLOCK_M), BLOCK_M)
    rbn = tl.max_contiguous(tl.multiple_of(rn % N, BLOCK_N), BLOCK_N)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        rk = k * BLOCK_K + tl.arange(0, BLOCK_K)
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptr + ram[:, None] * stride_am + rk[None, :], mask=rk[None, :] < K, other=0.0)
        w = tl.load(w_ptr + rk[:, None] * stride_wk + rbn[None, :], mask=rk[:, None] < K, other=0.0)
        v = tl.load(w_ptr + rk[:, None] * stride_wk + N + rbn[None, :], mask=rk[:, None] < K, other=0.0)
        up += tl.dot(a, w)
        gate += tl.dot(a, v)
    at = c_ptr + rm[:, None] * stride_cm + rn[None, :]
    # @overweave.store C=c_ptr[M, N]
    tl.store(at, up * gelu(gate), mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def rope_matmul(x_ptr, w_ptr, cos_ptr, sin_ptr, q_ptr, T, H, K, BT: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr):
    # @overweave.axis T block=BT
    # @overweave.axis H block=1
    # @overweave.dispatch begin
    # @overweave.pid_map T=tile H=head
    tile = tl.program_id(1)
    head = tl.program_id(0)
    # @overweave.dispatch end
    t = tile * BT + tl.arange(0, BT)
    d = tl.arange(0, HALF)
    first = tl.zeros((BT, HALF), tl.float32)
    second = tl.zeros((BT, HALF), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        # @overweave.load X=x_ptr[T, K]
        x = tl.load(x_ptr + t[:, None] * K + rk[None, :], mask=(t[:, None] < T) & (rk[None, :] < K), other=0.0)
        w = w_ptr + rk[:, None] * (H * 2 * HALF) + head * 2 * HALF + d[None, :]
        first += tl.dot(x, tl.load(w, mask=rk[:, None] < K, other=0.0))
        second += tl.dot(x, tl.load(w + HALF, mask=rk[:, None] < K, other=0.0))
    cos = tl.load(cos_ptr + t[:, None] * HALF + d[None, :], mask=t[:, None] < T, other=0.0)
    sin = tl.load(sin_ptr + t[:, None] * HALF + d[None, :], mask=t[:, None] < T, other=0.0)
    at = q_ptr + t[:, None] * H * 2 * HALF + head * 2 * HALF + d[None, :]
    # @overweave.store Q=q_ptr[T, H, 2 * HALF]
    tl.store(at, first * cos - second * sin, mask=t[:, None] < T)
    # @overweave.store Q=q_ptr[T, H, 2 * HALF]
    tl.store(at + HALF, second * cos + first * sin, mask=t[:, None] < T)


@triton.jit
def fp8_blocks_matmul(
    A, B, C, As, Bs, M, N, K, group_n, group_k, stride_am, stride_bn, stride_cm, stride_asm, stride_bsn, BM:
    tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = pid // tl.cdiv(N, BN)
    pid_n = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    offs_am = (pid_m * BM + tl.arange(0, BM)) % M
    offs_bn = (pid_n * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK)
    a_ptrs = A + (offs_am[:, None] * stride_am + offs_k[None, :])
    b_ptrs = B + (offs_k[:, None] + offs_bn[None, :] * stride_bn)
    As_ptrs = As + offs_am * stride_asm
    Bs_ptrs = Bs + (offs_bn // group_n) * stride_bsn
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        # @overweave.load A=A[M, K]
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BK, other=0.0)
        offs_ks = k * BK // group_k
        # @overweave.load AS=As[M, cdiv(K, group_k)]
        a_s = tl.load(As_ptrs + offs_ks)
        b_s = tl.load(Bs_ptrs + offs_ks)
        accumulator += tl.dot(a, b) * a_s[:, None] * b_s[None, :]
        a_ptrs += BK
        b_ptrs += BK
    offs_cm = pid_m * BM + tl.arange(0, BM)
    offs_cn = pid_n * BN + tl.arange(0, BN)
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    # @overweave.store C=C[M, N]
    tl.store(C + stride_cm * offs_cm[:, None] + offs_cn[None, :], accumulator, mask=c_mask)


@triton.jit
def swizzled(tile, down, across, GROUP: tl.constexpr):
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    return first + tile % height, tile % (GROUP * across) // height


@triton.jit
def transposed_persistent(
    x_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    # @overweave.tile_id persistent
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        # @overweave.dispatch begin
        # @overweave.pid_map M=pm N=pn
        pm, pn = swizzled(tile, down, across, GROUP)
        # @overweave.dispatch end
        rm = pm * BM + tl.arange(0, BM)
        rn = pn * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK):
            rk = k + tl.arange(0, BK)
            # @overweave.load X=x_ptr[M, K]
            x = tl.load(x_ptr + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
            # @overweave.load W=w_ptr[N, K]
            w = tl.load(w_ptr + rn[:, None] * K + rk[None, :], mask=(rn[:, None] < N) & (rk[None, :] < K), other=0.0)
            acc = tl.dot(x, tl.trans(w), acc)
        # @overweave.store Y=y_ptr[M, N]
        tl.store(y_ptr + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def batched_transposed(
    a_ptr, b_ptr, c_ptr, B, M, N, K, sab, sak, sam, sbb, sbk, sbn, scb, scm, scn, BM: tl.constexpr, BN:
    tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    # @overweave.axis B block=1
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.dispatch begin
    # @overweave.pid_map B=batch M=pm N=pn
    batch = tl.program_id(2)
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    # @overweave.dispatch end
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a = a_ptr + batch * sab + rk[None, :] * sak + rm[:, None] * sam
    b = b_ptr + batch * sbb + rk[:, None] * sbk + rn[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for left in range(K, 0, -BK):
        # @overweave.load A=a_ptr[B, K, M]
        x = tl.load(a, mask=(rm[:, None] < M) & (rk[None, :] < left), other=0.0)
        # @overweave.load W=b_ptr[B, K, N]
        w = tl.load(b, mask=(rk[:, None] < left) & (rn[None, :] < N), other=0.0)
        acc += tl.dot(x, w)
        a += BK * sak
        b += BK * sbk
    # @overweave.store C=c_ptr[B, M, N]
    tl.store(
        c_ptr + batch * scb + rm[:, None] * scm + rn[None, :] * scn, acc, mask=(rm[:, None] < M) & (rn[None, :] < N)
    )


@triton.jit
def conv1d_matmul(
    x_ptr, w_ptr, y_ptr, T, C, N, TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr
):
    # @overweave.axis OUT=T block=BT
    # @overweave.axis N block=BN
    # @overweave.dispatch begin
    # @overweave.pid_map OUT=pt N=pn
    pt = tl.program_id(0)
    pn = tl.program_id(1)
    # @overweave.dispatch end
    rt = pt * BT + tl.arange(0, BT)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros((BT, BN), tl.float32)
    for tap in tl.static_range(TAPS):
        before = rt + tap - (TAPS - 1)
        for c in range(0, C, BC):
            rc = c + tl.arange(0, BC)
            here = (before[:, None] >= 0) & (before[:, None] < T) & (rc[None, :] < C)
            # @overweave.load X=x_ptr[T, C]
            x = tl.load(x_ptr + before[:, None] * C + rc[None, :], mask=here, other=0.0)
            w = tl.load(
                w_ptr + (tap * C + rc)[:, None] * N + rn[None, :], mask=(rc[:, None] < C) & (rn[None, :] < N), other=0.0
            )
            acc += tl.dot(x, w)
    # @overweave.store Y=y_ptr[OUT, N]
    tl.store(y_ptr + rt[:, None] * N + rn[None, :], acc, mask=(rt[:, None] < T) & (rn[None, :] < N))


@triton.jit
def awq_matmul(
    a_ptr, q_ptr, z_ptr, s_ptr, c_ptr, M, N, K, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK:
    tl.constexpr
):  # fmt: skip
    # @overweave.axis M block=BM
    # @overweave.axis COLS=N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm COLS=pn
    pm = pid // tl.cdiv(N, BN)
    pn = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    shifts = (rn % 8) * 4
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        inside = (rk[:, None] < K) & (rn[None, :] < N)
        # @overweave.load Q=q_ptr[K, N // 8]
        q = tl.load(q_ptr + rk[:, None] * (N // 8) + rn[None, :] // 8, mask=inside, other=0)
        zero = tl.load(z_ptr + (rk[:, None] // G) * (N // 8) + rn[None, :] // 8, mask=inside, other=0)
        # @overweave.load S=s_ptr[K // G, COLS]
        scale = tl.load(s_ptr + (rk[:, None] // G) * N + rn[None, :], mask=inside, other=0.0)
        w = ((q >> shifts[None, :]) & 0xF) - ((zero >> shifts[None, :]) & 0xF)
        acc += tl.dot(a, w.to(tl.float32) * scale)
    # @overweave.store C=c_ptr[M, COLS]
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))
