"""Matmuls and an attention in the form of public ones, annotated, and with the kernels of rows all thirteen."""

from __future__ import annotations

from tests.compiler.untruths.public_rows import ROWS, Form

MATMUL = Form(
    "matmul_kernel",
    """@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
                  BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
                  GROUP_SIZE_M: tl.constexpr, ACTIVATION: tl.constexpr):
    # @overweave.axis M block=BLOCK_SIZE_M
    # @overweave.axis N block=BLOCK_SIZE_N
    # @overweave.tile_id
    pid = tl.program_id(axis=0)
    # @overweave.dispatch begin
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    # @overweave.dispatch end
    tl.assume(pid_m >= 0)
    tl.assume(stride_am > 0)
    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        # @overweave.load B=b_ptr[K, N]
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(tl.float16)
    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    # @overweave.store C=c_ptr[M, N]
    tl.store(c_ptrs, c, mask=c_mask)
""",
    {
        "M": 40,
        "N": 56,
        "K": 48,
        "stride_am": 48,
        "stride_ak": 1,
        "stride_bk": 56,
        "stride_bn": 1,
        "stride_cm": 56,
        "stride_cn": 1,
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 16,
        "BLOCK_SIZE_K": 16,
        "GROUP_SIZE_M": 8,
        "ACTIVATION": "leaky_relu",
        "a_ptr": (40, 48),
        "b_ptr": (48, 56),
        "c_ptr": (40, 56),
    },
)
PERSISTENT = Form(
    "matmul_kernel_persistent",
    """@triton.jit
def _compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M, NUM_SMS: tl.constexpr):
    group_id = tile_id // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + (tile_id % group_size_m)
    pid_n = (tile_id % num_pid_in_group) // group_size_m
    return pid_m, pid_n


@triton.jit
def matmul_kernel_persistent(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
                             stride_cn, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
                             BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr, NUM_SMS: tl.constexpr):
    # @overweave.axis M block=BLOCK_SIZE_M
    # @overweave.axis N block=BLOCK_SIZE_N
    start_pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    k_tiles = tl.cdiv(K, BLOCK_SIZE_K)
    num_tiles = num_pid_m * num_pid_n
    tile_id_c = start_pid - NUM_SMS
    offs_k_for_mask = tl.arange(0, BLOCK_SIZE_K)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    # @overweave.tile_id persistent
    for tile_id in tl.range(start_pid, num_tiles, NUM_SMS, flatten=True):
        # @overweave.dispatch begin
        # @overweave.pid_map M=pid_m N=pid_n
        pid_m, pid_n = _compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M, NUM_SMS)
        # @overweave.dispatch end
        start_m = pid_m * BLOCK_SIZE_M
        start_n = pid_n * BLOCK_SIZE_N
        offs_am = start_m + tl.arange(0, BLOCK_SIZE_M)
        offs_bn = start_n + tl.arange(0, BLOCK_SIZE_N)
        offs_am = tl.where(offs_am < M, offs_am, 0)
        offs_bn = tl.where(offs_bn < N, offs_bn, 0)
        offs_am = tl.max_contiguous(tl.multiple_of(offs_am, BLOCK_SIZE_M), BLOCK_SIZE_M)
        offs_bn = tl.max_contiguous(tl.multiple_of(offs_bn, BLOCK_SIZE_N), BLOCK_SIZE_N)
        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for ki in range(k_tiles):
            offs_k = ki * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
            b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
            # @overweave.load A=a_ptr[M, K]
            a = tl.load(a_ptrs, mask=offs_k_for_mask[None, :] < K - ki * BLOCK_SIZE_K, other=0.0)
            # @overweave.load B=b_ptr[K, N]
            b = tl.load(b_ptrs, mask=offs_k_for_mask[:, None] < K - ki * BLOCK_SIZE_K, other=0.0)
            accumulator = tl.dot(a, b, accumulator)
        # @overweave.dispatch begin
        tile_id_c += NUM_SMS
        # @overweave.pid_map M=pid_m N=pid_n
        pid_m, pid_n = _compute_pid(tile_id_c, num_pid_in_group, num_pid_m, GROUP_SIZE_M, NUM_SMS)
        # @overweave.dispatch end
        offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
        c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
        # @overweave.store C=c_ptr[M, N]
        tl.store(c_ptrs, accumulator.to(tl.float16), mask=c_mask)
""",
    {**{name: value for name, value in MATMUL.call.items() if name != "ACTIVATION"}, "NUM_SMS": 4},
)
FP8 = Form(
    "fp8_gemm_kernel",
    """@triton.jit
def fp8_gemm_kernel(a_ptr, b_ptr, c_ptr, a_s_ptr, b_s_ptr, M, N: tl.constexpr, K: tl.constexpr,
                    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr):
    # @overweave.axis M block=BLOCK_SIZE_M
    # @overweave.axis N block=BLOCK_SIZE_N
    # @overweave.dispatch begin
    # @overweave.pid_map M=pid_m N=pid_n
    pid_m = tl.program_id(axis=0)
    pid_n = tl.program_id(axis=1)
    # @overweave.dispatch end
    k = tl.cdiv(K, BLOCK_SIZE_K)
    offs_m = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_n = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + offs_m[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_n[None, :] * K + offs_k[:, None]
    a_s_ptrs = a_s_ptr + offs_m * k
    b_s_ptrs = b_s_ptr + (offs_n // BLOCK_SIZE_K) * k
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for i in range(k):
        # @overweave.load A=a_ptr[M, K]
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - i * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - i * BLOCK_SIZE_K, other=0.0)
        # @overweave.load A_S=a_s_ptr[M, cdiv(K, BLOCK_SIZE_K)]
        a_s = tl.load(a_s_ptrs)
        b_s = tl.load(b_s_ptrs)
        accumulator += tl.dot(a, b) * a_s[:, None] * b_s[None, :]
        a_ptrs += BLOCK_SIZE_K
        b_ptrs += BLOCK_SIZE_K
        a_s_ptrs += 1
        b_s_ptrs += 1
    c = accumulator.to(c_ptr.dtype.element_ty)
    offs_m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    # @overweave.store C=c_ptr[M, N]
    tl.store(c_ptrs, c, mask=mask)
""",
    {
        "M": 40,
        "N": 64,
        "K": 80,
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 32,
        "BLOCK_SIZE_K": 32,
        "a_ptr": (40, 80),
        "b_ptr": (64, 80),
        "c_ptr": (40, 64),
        "a_s_ptr": (40, 3),
        "b_s_ptr": (2, 3),
    },
)
ATTENTION = Form(
    "attn_fwd",
    """@triton.jit
def attn_fwd(Q, K, V, Out, sm_scale, H, N_CTX, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # @overweave.axis N_CTX block=BLOCK_M
    # @overweave.axis S=N_CTX block=BLOCK_N streamed
    # @overweave.axis H block=1
    # @overweave.dispatch begin
    # @overweave.pid_map N_CTX=start_m H=off_h
    start_m = tl.program_id(0)
    off_h = tl.program_id(1)
    # @overweave.dispatch end
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504
    # @overweave.load Q=Q[N_CTX, H, HEAD_DIM]
    q = tl.load(Q + (offs_m[:, None] * H + off_h) * HEAD_DIM + offs_d[None, :], mask=offs_m[:, None] < N_CTX, other=0.0)
    # @overweave.stream S
    for start_n in range(0, N_CTX, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        rows = (start_n + offs_n)[:, None]
        # @overweave.load K=K[S, H, HEAD_DIM]
        k = tl.load(K + (rows * H + off_h) * HEAD_DIM + offs_d[None, :], mask=rows < N_CTX, other=0.0)
        qk = tl.dot(q, k.T)
        qk = tl.where((start_n + offs_n)[None, :] < N_CTX, qk, -1.0e6)
        m_ij = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        qk = qk * qk_scale - m_ij[:, None]
        p = tl.math.exp2(qk)
        alpha = tl.math.exp2(m_i - m_ij)
        l_ij = tl.sum(p, 1)
        acc = acc * alpha[:, None]
        # @overweave.load V=V[S, H, HEAD_DIM]
        v = tl.load(V + (rows * H + off_h) * HEAD_DIM + offs_d[None, :], mask=rows < N_CTX, other=0.0)
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc)
        l_i = l_i * alpha + l_ij
        m_i = m_ij
    acc = acc / l_i[:, None]
    place = Out + (offs_m[:, None] * H + off_h) * HEAD_DIM + offs_d[None, :]
    # @overweave.store O=Out[N_CTX, H, HEAD_DIM]
    tl.store(place, acc.to(Out.type.element_ty), mask=offs_m[:, None] < N_CTX)
""",
    {
        "Q": (80, 2, 16),
        "K": (80, 2, 16),
        "V": (80, 2, 16),
        "Out": (80, 2, 16),
        "sm_scale": 0.25,
        "H": 2,
        "N_CTX": 80,
        "HEAD_DIM": 16,
        "BLOCK_M": 32,
        "BLOCK_N": 16,
    },
)
INNER = Form(
    "attn_fwd",
    """@triton.jit
def attn_fwd_inner(acc, l_i, m_i, q, k_ptrs, v_ptrs, start_m, offs_m, offs_n, qk_scale, N_CTX, HEAD_DIM: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGE: tl.constexpr):
    if STAGE == 1:
        lo, hi = 0, start_m * BLOCK_M
    else:
        lo, hi = start_m * BLOCK_M, (start_m + 1) * BLOCK_M
        lo = tl.multiple_of(lo, BLOCK_M)
    for start_n in range(lo, hi, BLOCK_N):
        # @overweave.load K=K[N_CTX, HEAD_DIM]
        k = tl.load(k_ptrs + start_n * HEAD_DIM, mask=(start_n + offs_n)[:, None] < N_CTX, other=0.0)
        qk = tl.dot(q, k.T)
        if STAGE == 2:
            mask = offs_m[:, None] >= (start_n + offs_n[None, :])
            qk = qk * qk_scale + tl.where(mask, 0, -1.0e6)
            m_ij = tl.maximum(m_i, tl.max(qk, 1))
            qk -= m_ij[:, None]
        else:
            m_ij = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
            qk = qk * qk_scale - m_ij[:, None]
        p = tl.math.exp2(qk)
        alpha = tl.math.exp2(m_i - m_ij)
        acc = acc * alpha[:, None]
        # @overweave.load V=V[N_CTX, HEAD_DIM]
        v = tl.load(v_ptrs + start_n * HEAD_DIM, mask=(start_n + offs_n)[:, None] < N_CTX, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_ij
    return acc, l_i, m_i


@triton.jit
def attn_fwd(Q, K, V, Out, sm_scale, N_CTX, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             STAGE: tl.constexpr):
    # @overweave.axis ROWS=N_CTX block=BLOCK_M
    # @overweave.tile_id
    start_m = tl.program_id(0)
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504
    q = tl.load(Q + offs_m[:, None] * HEAD_DIM + offs_d[None, :], mask=offs_m[:, None] < N_CTX, other=0.0)
    k_ptrs = K + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    v_ptrs = V + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    if STAGE & 1:
        acc, l_i, m_i = attn_fwd_inner(acc, l_i, m_i, q, k_ptrs, v_ptrs, start_m, offs_m, offs_n, qk_scale, N_CTX,
                                       HEAD_DIM, BLOCK_M, BLOCK_N, 4 - STAGE)
    if STAGE & 2:
        acc, l_i, m_i = attn_fwd_inner(acc, l_i, m_i, q, k_ptrs, v_ptrs, start_m, offs_m, offs_n, qk_scale, N_CTX,
                                       HEAD_DIM, BLOCK_M, BLOCK_N, 2)
    acc = acc / l_i[:, None]
    o_ptrs = Out + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    # @overweave.store O=Out[ROWS, HEAD_DIM]
    tl.store(o_ptrs, acc.to(Out.type.element_ty), mask=offs_m[:, None] < N_CTX)
""",
    {
        "Q": (80, 16),
        "K": (80, 16),
        "V": (80, 16),
        "Out": (80, 16),
        "sm_scale": 0.25,
        "N_CTX": 80,
        "HEAD_DIM": 16,
        "BLOCK_M": 32,
        "BLOCK_N": 16,
        "STAGE": 3,
    },
)
FORMS = (*ROWS, MATMUL, PERSISTENT, FP8, ATTENTION, INNER)
