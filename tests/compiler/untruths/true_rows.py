"""Public kernels of rows: parts of an entropy and of norms, what adds parts up, softmax over rows, dropout by seed."""

import triton
import triton.language as tl


@triton.jit
def column_softmax(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    cols = pid * BN + tl.arange(0, BN)
    top = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        rows = start + tl.arange(0, BM)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=float("-inf"))
        above = tl.maximum(top, tl.max(tl.where(cols[None, :] < N, x, 0.0), 0))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(x - above[None, :]), 0)
        top = above
    for start in range(0, M, BM):
        rows = start + tl.arange(0, BM)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=0.0)
        # @overweave.store Y=y_ptr[M, N]
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], tl.exp(x - top[None, :]) / total[None, :], mask=inside)


@triton.jit
def dropout_add(x_ptr, r_ptr, y_ptr, M, N, p, seed, BM: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis M block=BM
    # @overweave.axis N block=BN
    # @overweave.dispatch begin
    # @overweave.pid_map M=pm N=pn
    pm = tl.program_id(1)
    pn = tl.program_id(0)
    # @overweave.dispatch end
    rows = pm * BM + tl.arange(0, BM)
    cols = pn * BN + tl.arange(0, BN)
    at = rows[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    # @overweave.load X=x_ptr[M, N]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    # @overweave.load R=r_ptr[M, N]
    r = tl.load(r_ptr + at, mask=inside, other=0.0)
    kept = tl.rand(seed, at) > p
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + at, r + tl.where(kept, x / (1.0 - p), 0.0), mask=inside)


@triton.jit
def entropy_parts(logits_ptr, labels_ptr, lse_ptr, loss_ptr, M, V, stride, BV: tl.constexpr):
    # @overweave.axis M block=1
    # @overweave.axis V block=BV
    # @overweave.dispatch begin
    # @overweave.pid_map M=row V=part
    row = tl.program_id(0)
    part = tl.program_id(1)
    # @overweave.dispatch end
    parts = tl.cdiv(V, BV)
    label = tl.load(labels_ptr + row)
    cols = part * BV + tl.arange(0, BV)
    # @overweave.load X=logits_ptr[M, V]
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < V, other=float("-inf"))
    top = tl.max(x, 0)
    lse = top + tl.log(tl.sum(tl.exp(x - top), 0))
    # @overweave.store LSE=lse_ptr[M, blocks(V)]
    tl.store(lse_ptr + row * parts + part, lse)
    # @overweave.store HIT=loss_ptr[M, blocks(V)]
    tl.store(loss_ptr + row * parts + part, tl.sum(tl.where(cols == label, x, 0.0), 0))


@triton.jit
def norm_with_parts(X, W, B, Y, Mean, Rstd, Part, M, N, eps, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # @overweave.axis M block=ROWS
    # @overweave.tile_id
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    # @overweave.load X=X[M, N]
    x = tl.load(X + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    mean = tl.sum(x, 1) / N
    centred = tl.where(cols[None, :] < N, x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / N + eps)
    w = tl.load(W + cols, mask=cols < N, other=0.0)
    b = tl.load(B + cols, mask=cols < N, other=0.0)
    y = centred * rstd[:, None] * w[None, :] + b[None, :]
    # @overweave.store MEAN=Mean[M]
    tl.store(Mean + rows, mean, mask=rows < M)
    # @overweave.store RSTD=Rstd[M]
    tl.store(Rstd + rows, rstd, mask=rows < M)
    # @overweave.store Y=Y[M, N]
    tl.store(Y + rows[:, None] * stride + cols[None, :], y, mask=inside)
    peak = tl.max(tl.where(rows[:, None] < M, y, float("-inf")), 0)
    total = tl.sum(tl.where(rows[:, None] < M, tl.exp(y - peak[None, :]), 0.0), 0)
    # @overweave.store PART=Part[blocks(M), N]
    tl.store(Part + pid * N + cols, peak + tl.log(total), mask=cols < N)


@triton.jit
def sum_of_parts(dw_ptr, db_ptr, out_w_ptr, out_b_ptr, G, N, BG: tl.constexpr, BN: tl.constexpr):
    # @overweave.axis G block=BG streamed
    # @overweave.axis N block=BN
    # @overweave.tile_id
    pid = tl.program_id(0)
    cols = pid * BN + tl.arange(0, BN)
    dw = tl.zeros((BG, BN), dtype=tl.float32)
    db = tl.zeros((BG, BN), dtype=tl.float32)
    # @overweave.stream G
    for i in range(0, G, BG):
        rows = i + tl.arange(0, BG)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        # @overweave.load DW=dw_ptr[G, N]
        dw += tl.load(dw_ptr + offs, mask=mask, other=0.0)
        # @overweave.load DB=db_ptr[G, N]
        db += tl.load(db_ptr + offs, mask=mask, other=0.0)
    # @overweave.store OUT_W=out_w_ptr[N]
    tl.store(out_w_ptr + cols, tl.sum(dw, axis=0), mask=cols < N)
    # @overweave.store OUT_B=out_b_ptr[N]
    tl.store(out_b_ptr + cols, tl.sum(db, axis=0), mask=cols < N)


@triton.jit
def combined_parts(o_ptr, l_ptr, y_ptr, S, H, D: tl.constexpr):
    # @overweave.axis H block=1
    # @overweave.tile_id
    head = tl.program_id(0)
    d = tl.arange(0, D)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in range(S):
        # @overweave.load O=o_ptr[S, H, D]
        o = tl.load(o_ptr + (split * H + head) * D + d)
        # @overweave.load L=l_ptr[S, H]
        lse = tl.load(l_ptr + split * H + head)
        above = tl.maximum(top, lse)
        old = tl.exp(top - above)
        new = tl.exp(lse - above)
        acc = acc * old + new * o
        total = total * old + new
        top = above
    # @overweave.store Y=y_ptr[H, D]
    tl.store(y_ptr + head * D + d, acc / total)
