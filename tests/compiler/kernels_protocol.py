"""Small kernels that wait, move data and announce it the way ours do: right ones, and ones with the known mistakes."""

from __future__ import annotations

import triton
import triton.language as tl

WAIT_ASM = tl.constexpr("""{
.reg .pred poller, p; .reg .u32 v, w, tid; .reg .u64 t0, t1;
mov.u32 v, 1;
mov.u32 tid, %tid.x;
setp.ne.u32 poller, tid, 0;
@poller bra seen;
mov.u64 t0, %globaltimer;
spin: ld.acquire.sys.global.u32 w, [$1];
sub.s32 w, w, $2;
setp.ge.s32 p, w, 0;
@p bra seen;
ld.relaxed.sys.global.u32 w, [$3];
setp.ne.u32 p, w, 0;
@p bra void;
mov.u64 t1, %globaltimer;
sub.u64 t1, t1, t0;
setp.lt.u64 p, t1, $4;
@p bra spin;
void: mov.u32 v, 0;
seen: setp.ne.u32 p, v, 0;
bar.red.and.pred p, 0, p;
selp.u32 $0, 1, 0, p;
fence.proxy.async.global;
}""")
# The same spin, but nobody watches the clock or the abort word.
ENDLESS_ASM = tl.constexpr("""{
.reg .pred poller, p; .reg .u32 w, tid;
mov.u32 tid, %tid.x;
setp.ne.u32 poller, tid, 0;
@poller bra seen;
spin: ld.acquire.sys.global.u32 w, [$1];
sub.s32 w, w, $2;
setp.lt.s32 p, w, 0;
@p bra spin;
seen: bar.sync 0;
mov.u32 $0, 1;
fence.proxy.async.global;
}""")
DRAIN_ASM = tl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@triton.jit
def wait(signal, epoch, abort, timeout_ns):
    return tl.inline_asm_elementwise(
        WAIT_ASM, "=r,l,r,l,l", [signal, epoch, abort, timeout_ns], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_endless(signal, epoch):
    return tl.inline_asm_elementwise(ENDLESS_ASM, "=r,l,r", [signal, epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def drain():
    tl.inline_asm_elementwise(DRAIN_ASM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def matmul_waits(
    a_desc, b_desc, y, signals, abort, claims, epoch, timeout_ns, m, n, k, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """All-gather side: a tile waits for its chunk, then loads it by bulk tensor loads."""
    tiles = tl.cdiv(m, BM) * tiles_n
    tile = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        row = tile // tiles_n
        col = tile % tiles_n
        ok = wait(signals + row * 32, epoch, abort, timeout_ns)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, k, BK):
            acc = tl.dot(a_desc.load([row * BM, step]), b_desc.load([step, col * BN]), acc)
        acc = tl.where(ok != 0, acc, float("nan"))
        r = row * BM + tl.arange(0, BM)
        c = col * BN + tl.arange(0, BN)
        inside = (r[:, None] < m) & (c[None, :] < n)
        tl.store(y + r[:, None].to(tl.int64) * n + c[None, :], acc.to(tl.bfloat16), mask=inside)
        tile = tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")


@triton.jit
def matmul_notifies(
    a_desc, b_desc, y, y_desc, signals, m, n, k, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BULK: tl.constexpr, BARRIER: tl.constexpr, DRAINS: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """Reduce-scatter side: a tile stores its part and announces it."""
    for tile in range(tl.program_id(0), tl.cdiv(m, BM) * tiles_n, tl.num_programs(0)):
        row = tile // tiles_n
        col = tile % tiles_n
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, k, BK):
            acc = tl.dot(a_desc.load([row * BM, step]), b_desc.load([step, col * BN]), acc)
        if BULK:
            y_desc.store([row * BM, col * BN], acc.to(tl.bfloat16))
            if DRAINS:
                drain()
        else:
            r = row * BM + tl.arange(0, BM)
            c = col * BN + tl.arange(0, BN)
            inside = (r[:, None] < m) & (c[None, :] < n)
            tl.store(y + r[:, None].to(tl.int64) * n + c[None, :], acc.to(tl.bfloat16), mask=inside)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_add(signals + row * 32, 1, sem="release", scope=SCOPE, mask=row >= 0)


@triton.jit
def reduce_waits(
    slots, own, y, signals, abort, epoch, timeout_ns, rows, cols, slot_size,
    W: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Ordered sum of what arrived. WAIT: bounded | endless | plain | volatile | atomic | none."""
    pid = tl.program_id(0)
    offsets = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = 1
    if WAIT == "bounded":
        ok = wait(signals + pid * 32, epoch, abort, timeout_ns)
    elif WAIT == "endless":
        ok = wait_endless(signals + pid * 32, epoch)
    elif WAIT == "plain":
        while tl.load(signals + pid * 32) < epoch:
            pass
    elif WAIT == "volatile":
        while tl.load(signals + pid * 32, volatile=True) < epoch:
            pass
    elif WAIT == "atomic":
        while tl.atomic_add(signals + pid * 32, 0, sem="acquire", scope="sys") < epoch:
            pass
    inside = offsets < rows * cols
    total = tl.load(own + offsets, mask=inside, other=0.0).to(tl.float32)
    for source in tl.static_range(W - 1):
        total += tl.load(slots + source * slot_size + offsets, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(ok != 0, total, float("nan"))
    tl.store(y + offsets, total.to(tl.bfloat16), mask=inside)


@triton.jit
def begin(
    own_pad, peer_credits, own_credits, abort, timeout_ns, signals,
    BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Head of a call: zero the own pad, give credits to peers (addresses from a table), wait for theirs."""
    index = tl.arange(0, BLOCK)
    tl.store(own_pad + index * 32, tl.zeros((BLOCK,), dtype=tl.int32), mask=index < signals)
    tl.debug_barrier()
    for peer in range(W - 1):
        credit = tl.load(peer_credits + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_add(credit, 1, sem="release", scope="sys")
    for peer in range(W - 1):
        wait(own_credits + peer * 32, 1, abort, timeout_ns)


@triton.jit
def spills(x, y, SIZE: tl.constexpr):
    """Needs more registers than `maxnreg` leaves it."""
    index = tl.arange(0, SIZE)
    value = tl.load(x + index[:, None] * SIZE + index[None, :])
    tl.store(y + index[:, None] * SIZE + index[None, :], tl.dot(value, value))


@triton.jit
def sounds(slots, y, signals, words, limits, epoch, timeout_ns, world_size, SIZE: tl.constexpr):
    """A wait whose time may be up: one block of the rank reports it, and tells every peer."""
    ok = wait(signals, epoch, words, timeout_ns)
    if ok == 0:
        if tl.atomic_cas(words, 0, 1, sem="acq_rel", scope="sys") == 0:
            report = tl.load(limits).to(tl.pointer_type(tl.int32))
            tl.store(report + 1, epoch)
            tl.debug_barrier()
            tl.atomic_xchg(report, 1, sem="release", scope="sys")
            for peer in range(world_size):
                word = tl.load(limits + 1 + peer).to(tl.pointer_type(tl.int32))
                tl.atomic_cas(word, 0, 2, sem="acq_rel", scope="sys")
    cols = tl.arange(0, SIZE)
    x = tl.load(slots + cols)
    tl.store(y + cols, tl.where(ok == 1, x, float("nan")))
