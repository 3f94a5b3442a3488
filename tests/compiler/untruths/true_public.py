"""Public kernels with an entry per block, packed weights, whole numbers, and strides for every dimension."""

import triton
import triton.language as tl


@triton.jit
def split_decode(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, S, H, scale, D: tl.constexpr, BS: tl.constexpr):
    # @overweave.axis H block=1
    # @overweave.axis S block=BS
    # @overweave.dispatch begin
    # @overweave.pid_map H=head S=split
    head = tl.program_id(0)
    split = tl.program_id(1)
    # @overweave.dispatch end
    d = tl.arange(0, D)
    s = split * BS + tl.arange(0, BS)
    q = tl.load(q_ptr + head * D + d)
    # @overweave.load K=k_ptr[S, H, D]
    k = tl.load(k_ptr + (s[:, None] * H + head) * D + d[None, :], mask=s[:, None] < S, other=0.0)
    # @overweave.load V=v_ptr[S, H, D]
    v = tl.load(v_ptr + (s[:, None] * H + head) * D + d[None, :], mask=s[:, None] < S, other=0.0)
    qk = tl.where(s < S, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
    top = tl.max(qk, 0)
    p = tl.exp(qk - top)
    total = tl.sum(p, 0)
    # @overweave.store O=o_ptr[blocks(S), H, D]
    tl.store(o_ptr + (split * H + head) * D + d, tl.sum(p[:, None] * v, 0) / total)
    # @overweave.store L=l_ptr[blocks(S), H]
    tl.store(l_ptr + split * H + head, top + tl.log(total))


@triton.jit
def norm_backward(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.tile_id
    pid = tl.program_id(0)
    cols = tl.arange(0, BN)
    inside = cols < N
    w = tl.load(w_ptr + cols, mask=inside, other=0.0)
    dw = tl.zeros((BN,), tl.float32)
    for i in range(BM):
        row = pid * BM + i
        here = inside & (row < M)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + row * N + cols, mask=here, other=0.0)
        # @overweave.load DY=dy_ptr[M, N]
        dy = tl.load(dy_ptr + row * N + cols, mask=here, other=0.0)
        dw += dy * x
        # @overweave.store DX=dx_ptr[M, N]
        tl.store(dx_ptr + row * N + cols, dy * w - x, mask=here)
    # @overweave.store DW=dw_ptr[blocks(M), N]
    tl.store(dw_ptr + pid * N + cols, dw, mask=inside)


@triton.jit
def int4_matmul(
    x_ptr, q_ptr, s_ptr, y_ptr, M, N, K, sxm, sxk, sqk, sqn, ssg, ssn, sym, syn, G: tl.constexpr, BM:
    tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = pid // tl.cdiv(N, BN)
    pn = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    rm = (pm * BM + tl.arange(0, BM)) % M
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    x_ptrs = x_ptr + rm[:, None] * sxm + rk[None, :] * sxk
    q_ptrs = q_ptr + (rk[:, None] // 8) * sqk + rn[None, :] * sqn
    shift = (rk % 8) * 4
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        # @overweave.load X=x_ptr[M, K]
        x = tl.load(x_ptrs, mask=rk[None, :] < K - k * BK, other=0.0)
        # @overweave.load Q=q_ptr[K // 8, N]
        q = tl.load(q_ptrs, mask=(rk[:, None] < K - k * BK) & (rn[None, :] < N), other=0)
        # @overweave.load S=s_ptr[K // G, N]
        s = tl.load(s_ptr + (k * BK // G) * ssg + rn * ssn, mask=rn < N, other=0.0)
        w = (((q >> shift[:, None]) & 15) - 8).to(tl.float32) * s[None, :]
        acc += tl.dot(x, w)
        x_ptrs += BK * sxk
        q_ptrs += (BK // 8) * sqk
    r = pm * BM + tl.arange(0, BM)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + r[:, None] * sym + rn[None, :] * syn, acc, mask=(r[:, None] < M) & (rn[None, :] < N))


@triton.jit
def int8_matmul(a_ptr, b_ptr, s_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = pid // tl.cdiv(N, BN)
    pn = pid % tl.cdiv(N, BN)
    # @overweave.dispatch end
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0)
        # @overweave.load B=b_ptr[K, N]
        b = tl.load(b_ptr + rk[:, None] * N + rn[None, :], mask=(rk[:, None] < K) & (rn[None, :] < N), other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    # @overweave.load SA=s_ptr[M]
    s = tl.load(s_ptr + rm, mask=rm < M, other=0.0)
    # @overweave.store C=c_ptr[M, N]
    tl.store(
        c_ptr + rm[:, None] * N + rn[None, :],
        acc.to(tl.float32) * s[:, None],
        mask=(rm[:, None] < M) & (rn[None, :] < N),
    )


@triton.jit
def flash(
    Q, K, V, Out, sqz, sqh, sqm, sqk, skz, skh, skn, skk, svz, svh, svn, svk, soz, soh, som, son, Z, H, N_CTX,
    scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    # @overweave.axis ZH=Z * H block=1
    # @overweave.axis M=N_CTX block=BM
    # @overweave.dispatch begin
    # @overweave.pid_map M=start_m ZH=off_hz
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1)
    # @overweave.dispatch end
    off_z = off_hz // H
    off_h = off_hz % H
    base = off_z.to(tl.int64) * sqz + off_h.to(tl.int64) * sqh
    rm = start_m * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    d = tl.arange(0, D)
    # @overweave.load Q=Q[ZH, M, D]
    q = tl.load(Q + base + rm[:, None] * sqm + d[None, :] * sqk, mask=rm[:, None] < N_CTX, other=0.0)
    m_i = tl.zeros((BM,), tl.float32) - float("inf")
    l_i = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(0, N_CTX, BN):
        cols = n + rn
        # @overweave.load K=K[ZH, N_CTX, D]
        k = tl.load(
            K + off_z * skz + off_h * skh + cols[None, :] * skn + d[:, None] * skk,
            mask=cols[None, :] < N_CTX,
            other=0.0,
        )
        s = tl.where(cols[None, :] < N_CTX, tl.dot(q, k) * scale, float("-inf"))
        top = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        alpha = tl.exp(m_i - top)
        # @overweave.load V=V[ZH, N_CTX, D]
        v = tl.load(
            V + off_z * svz + off_h * svh + cols[:, None] * svn + d[None, :] * svk,
            mask=cols[:, None] < N_CTX,
            other=0.0,
        )
        acc = acc * alpha[:, None] + tl.dot(p, v)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = top
    # @overweave.store O=Out[ZH, M, D]
    tl.store(
        Out + off_z * soz + off_h * soh + rm[:, None] * som + d[None, :] * son,
        acc / l_i[:, None],
        mask=rm[:, None] < N_CTX,
    )
