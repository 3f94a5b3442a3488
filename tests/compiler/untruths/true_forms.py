"""Public kernels whose loops end early, count up before their use, or carry a softmax through a helper function."""

import triton
import triton.language as tl


@triton.jit
def rms_backward(dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # @overweave.axis M block=ROWS
    # @overweave.tile_id
    pid = tl.program_id(0)
    first = pid * ROWS
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, min(first + ROWS, M)):
        # @overweave.load DY=dy_ptr[M, N]
        dy = tl.load(dy_ptr + row * stride + cols, mask=mask, other=0.0)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        xhat = x * rstd
        mean = tl.sum(xhat * dy * w, axis=0) / N
        # @overweave.store DX=dx_ptr[M, N]
        tl.store(dx_ptr + row * stride + cols, (dy * w - xhat * mean) * rstd, mask=mask)
        dw += dy * xhat
    # @overweave.store DW=dw_ptr[blocks(M), N]
    tl.store(dw_ptr + pid * N + cols, dw, mask=mask)


@triton.jit
def softmax_step(acc, total, top, q, k, v, inside, scale):
    s = tl.where(inside, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
    above = tl.maximum(top, tl.max(s, 0))
    shrink = tl.exp(top - above)
    p = tl.exp(s - above)
    return acc * shrink + tl.sum(p[:, None] * v, 0), total * shrink + tl.sum(p, 0), above


@triton.jit
def grouped_decode(q_ptr, k_ptr, v_ptr, o_ptr, S, HQ, HK, scale, D: tl.constexpr, BS: tl.constexpr):
    # @overweave.axis HQ block=1
    # @overweave.tile_id
    head = tl.program_id(0)
    of_keys = head // (HQ // HK)
    d = tl.arange(0, D)
    # @overweave.load Q=q_ptr[HQ, D]
    q = tl.load(q_ptr + head * D + d)
    acc = tl.zeros([D], tl.float32)
    total = 0.0
    top = -float("inf")
    for start in tl.range(0, arg2=S, step=BS):
        s = start + tl.arange(0, BS)
        inside = s < S
        # @overweave.load K=k_ptr[S, HK, D]
        k = tl.load(k_ptr + (s[:, None] * HK + of_keys) * D + d[None, :], mask=inside[:, None], other=0.0)
        # @overweave.load V=v_ptr[S, HK, D]
        v = tl.load(v_ptr + (s[:, None] * HK + of_keys) * D + d[None, :], mask=inside[:, None], other=0.0)
        acc, total, top = softmax_step(acc, total, top, q, k, v, inside, scale)
    # @overweave.store O=o_ptr[HQ, D]
    tl.store(o_ptr + head * D + d, acc / total)


@triton.jit
def counted_up_matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = pid % tl.cdiv(M, BM)
    pn = pid // tl.cdiv(M, BM)
    # @overweave.dispatch end
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    left = K
    k = -BK
    while left > 0:
        k += BK
        left -= BK
        rk = k + tl.arange(0, BK)
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=(rm < M)[:, None] & (rk < K)[None, :], other=0.0)
        # @overweave.load B=b_ptr[K, N]
        b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=(rk < K)[:, None] & (rn < N)[None, :], other=0.0)
        acc += tl.dot(a, b)
    # @overweave.store C=c_ptr[M, N]
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def int8_pointers_matmul(x_ptr, w_ptr, s_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = pid // tl.cdiv(N, BN)
    pn = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    xs = tl.make_block_ptr(x_ptr, (M, K), (K, 1), (pm * BM, 0), (BM, BK), (1, 0))
    ws = tl.make_block_ptr(w_ptr, (K, N), (N, 1), (0, pn * BN), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        # @overweave.load X=x_ptr[M, K]
        x = tl.load(xs, boundary_check=(0, 1), padding_option="zero")
        # @overweave.load W=w_ptr[K, N]
        w = tl.load(ws, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(x, w.to(x.dtype), acc)
        xs = tl.advance(xs, (0, BK))
        ws = tl.advance(ws, (BK, 0))
    cols = pn * BN + tl.arange(0, BN)
    acc *= tl.load(s_ptr + cols, mask=cols < N, other=0.0)[None, :]
    ys = tl.make_block_ptr(y_ptr, (M, N), (N, 1), (pm * BM, pn * BN), (BM, BN), (1, 0))
    # @overweave.store Y=y_ptr[M, N]
    tl.store(ys, acc.to(y_ptr.dtype.element_ty), boundary_check=(0, 1))
