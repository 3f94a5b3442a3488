"""Kernels whose places were not understood: extents of 1, equal extents, halves, strides and constants by name."""

import triton
import triton.language as tl


@triton.jit
def plain_matmul(x_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = pid // tl.cdiv(N, BN)
    pn = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    rows = (pm * BM + tl.arange(0, BM)) % M
    cols = (pn * BN + tl.arange(0, BN)) % N
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        # @overweave.load X=x_ptr[M, K]
        x = tl.load(x_ptr + rows[:, None] * K + ks[None, :], mask=ks[None, :] < K, other=0.0)
        # @overweave.load W=w_ptr[K, N]
        w = tl.load(w_ptr + ks[:, None] * N + cols[None, :], mask=ks[:, None] < K, other=0.0)
        acc += tl.dot(x, w)
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + r[:, None] * N + c[None, :], acc, mask=(r[:, None] < M) & (c[None, :] < N))


@triton.jit
def wrapped(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    # @overweave.dispatch end
    rows = pm * BM + tl.arange(0, BM)
    cols = pn * BN + tl.arange(0, BN)
    # @overweave.load X=x_ptr[M, N]
    x = tl.load(x_ptr + (rows % M)[:, None] * N + (cols % N)[None, :])
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], x + 1, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def even_and_odd(x_ptr, y_ptr, M, N, H: tl.constexpr):
    # @overweave.axis M block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    h = tl.arange(0, H)
    # @overweave.load X=x_ptr[M, N]
    a = tl.load(x_ptr + row * N + 2 * h, mask=2 * h < N, other=0.0)
    # @overweave.load X=x_ptr[M, N]
    b = tl.load(x_ptr + row * N + 2 * h + 1, mask=2 * h + 1 < N, other=0.0)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + row * N + 2 * h, a - b, mask=h < (N + 1) // 2)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + row * N + 2 * h + 1, a + b, mask=h < N // 2)


@triton.jit
def slabs(
    a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scs, scm, scn, BM: tl.constexpr, BN: tl.constexpr, BK:
    tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.axis Z=SPLIT block=1
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn Z=pz
    pid = tl.program_id(0)
    pz = tl.program_id(1)
    across = tl.cdiv(N, BN)
    pm = pid // across
    pn = pid % across
    # @overweave.dispatch end
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = pz * BK + tl.arange(0, BK)
    a = a_ptr + (rm % M)[:, None] * sam + rk[None, :] * sak
    b = b_ptr + rk[:, None] * sbk + (rn % N)[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK * SPLIT)):
        left = K - k * (BK * SPLIT)
        # @overweave.load A=a_ptr[M, K]
        x = tl.load(a, mask=rk[None, :] < left, other=0.0)
        # @overweave.load B=b_ptr[K, N]
        w = tl.load(b, mask=rk[:, None] < left, other=0.0)
        acc += tl.dot(x, w)
        a += BK * SPLIT * sak
        b += BK * SPLIT * sbk
    # @overweave.store C=c_ptr[Z, M, N]
    tl.store(c_ptr + pz * scs + rm[:, None] * scm + rn[None, :] * scn, acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def quotients(x_ptr, y_ptr, M, N, BM: tl.constexpr, H: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.tile_id
    pm = tl.program_id(0)
    rows = pm * BM + tl.arange(0, BM)
    h = tl.arange(0, H)
    half = N // 2
    here = (rows[:, None] < M) & (h[None, :] < half)
    # @overweave.load X=x_ptr[M, N]
    a = tl.load(x_ptr + rows[:, None] * N + h[None, :], mask=here, other=0.0)
    # @overweave.load X=x_ptr[M, N]
    b = tl.load(x_ptr + rows[:, None] * N + half + h[None, :], mask=here, other=0.0)
    # @overweave.store Y=y_ptr[M, N // 2]
    tl.store(y_ptr + rows[:, None] * half + h[None, :], a * b, mask=here)


@triton.jit
def halves(x_ptr, y_ptr, T, D: tl.constexpr, HALF: tl.constexpr):
    # @overweave.axis T block=1
    # @overweave.tile_id
    t = tl.program_id(0)
    h = tl.arange(0, HALF)
    # @overweave.load X=x_ptr[T, D]
    a = tl.load(x_ptr + t * D + h)
    # @overweave.load X=x_ptr[T, D]
    b = tl.load(x_ptr + t * D + HALF + h)
    # @overweave.store Y=y_ptr[T, D]
    tl.store(y_ptr + t * D + h, b)
    # @overweave.store Y=y_ptr[T, D]
    tl.store(y_ptr + t * D + HALF + h, -a)


@triton.jit
def strides(x_ptr, y_ptr, M, sxm, sxd, sym, syd, D: tl.constexpr, BM: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.tile_id
    pm = tl.program_id(0)
    rows = pm * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    # @overweave.load X=x_ptr[M, D]
    x = tl.load(x_ptr + rows[:, None] * sxm + d[None, :] * sxd, mask=rows[:, None] < M, other=0.0)
    # @overweave.store Y=y_ptr[M, D]
    tl.store(y_ptr + rows[:, None] * sym + d[None, :] * syd, x + 1, mask=rows[:, None] < M)


@triton.jit
def one_head(x_ptr, y_ptr, M, H, P, BM: tl.constexpr, D: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis HQ=P block=1
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm HQ=head
    pm = tl.program_id(0)
    head = tl.program_id(1)
    # @overweave.dispatch end
    rows = pm * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    # @overweave.load X=x_ptr[M, H, D]
    x = tl.load(x_ptr + (rows[:, None] * H + head // 2) * D + d[None, :], mask=rows[:, None] < M, other=0.0)
    # @overweave.store Y=y_ptr[M, HQ, D]
    tl.store(y_ptr + (rows[:, None] * P + head) * D + d[None, :], x + head, mask=rows[:, None] < M)


TILE = tl.constexpr(8)
WIDE: tl.constexpr = 2 * TILE


@triton.jit
def constants(x_ptr, y_ptr, M, N):
    # @overweave.axis M block=TILE
    # @overweave.axis N block=WIDE
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    # @overweave.dispatch end
    rows = pm * TILE + tl.arange(0, 8)
    cols = pn * 16 + tl.arange(0, 16)
    at = tl.expand_dims(rows, -1) * N + tl.expand_dims(cols, 0)
    inside = tl.expand_dims(rows < M, -1) & tl.expand_dims(cols < N, 0)
    # @overweave.load X=x_ptr[M, N]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + at, 2 * x, mask=inside)


@triton.jit
def from_right(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.tile_id
    pm = tl.program_id(0)
    rows = pm * BM + tl.arange(0, BM)
    total = tl.zeros((BM,), tl.float32)
    for k in range(0, N, BN):
        cols = N - BN - k + tl.arange(0, BN)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(
            x_ptr + rows[:, None] * N + cols[None, :], mask=(rows[:, None] < M) & (cols[None, :] >= 0), other=0.0
        )
        total += tl.sum(x, 1)
    # @overweave.store Y=y_ptr[M]
    tl.store(y_ptr + rows, total, mask=rows < M)


@triton.jit
def masks(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.tile_id
    pm = tl.program_id(0)
    rows = tl.reshape(pm * BM + tl.arange(0, BM), (BM, 1))
    start = 0
    while start < N:
        cols = (start + tl.arange(0, BN)).reshape(1, BN)
        outside = (rows >= M) | (cols >= N)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + rows * N + cols, mask=(rows < M) * (cols < N), other=0.0)
        # @overweave.store Y=y_ptr[M, N]
        tl.store(y_ptr + rows * N + cols, x * 2, mask=~outside)
        start += BN
