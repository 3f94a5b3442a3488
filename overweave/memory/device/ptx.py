"""Every PTX string of overweave. No other module holds an instruction.

Scalar inline assembly runs in every thread of a block, labels are local to the braces, and `$n` are the operands.
"""

# Operands: status, word, expected value, abort word, time limit in ns.
# The poll ends with an acquire that saw the value, or at the deadline, or when the abort word is set. Values only grow
# and are compared by signed difference. The proxy fence orders later bulk-tensor loads behind the acquire, too.
_POLL = """
    mov.u64 start, %globaltimer;
spin:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 scratch, seen, $2;
    setp.ge.s32 reached, scratch, 0;
    @reached bra decided;
    ld.relaxed.sys.global.b32 scratch, [$3];
    setp.ne.b32 other, scratch, 0;
    @other bra decided;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 other, now, $4;
    @other bra spin;
decided:
"""
_REGISTERS = """
    .reg .pred reached, other;
    .reg .b32 seen, scratch;
    .reg .b64 start, now;
"""
# sm_90 on: orders bulk copies, which run in the async proxy, behind the wait. Assemblers for older GPUs refuse it.
_FENCE = "    fence.proxy.async.global;\n"
_VERDICT = "    selp.b32 $0, 1, 0, reached;\n"


# Thread 0 polls for its block. The block barrier makes the status the same for all threads and orders their later loads
# behind thread 0's acquire.
_ONLY_THREAD_0 = """
    mov.u32 scratch, %tid.x;
    setp.eq.u32 reached, scratch, scratch;
    setp.ne.u32 other, scratch, 0;
    @other bra decided;
"""
_BLOCK_AGREES = "    bar.red.and.pred reached, 0, reached;"
WAIT_UNTIL_AT_LEAST = "{" + _REGISTERS + _ONLY_THREAD_0 + _POLL + _BLOCK_AGREES + _VERDICT + _FENCE + "}"

# The same for as many words as a warp has lanes, at once: each lane of the first warp that has a word polls its own.
# Operands: as above, then whether the lane has a word.
WARP_LANES = 32
_ONLY_LANES_WITH_A_WORD = f"""
    mov.u32 scratch, %tid.x;
    setp.eq.u32 reached, scratch, scratch;
    setp.ge.u32 other, scratch, {WARP_LANES};
    @other bra decided;
    setp.eq.u32 other, $5, 0;
    @other bra decided;
"""
WAIT_UNTIL_EACH_AT_LEAST = "{" + _REGISTERS + _ONLY_LANES_WITH_A_WORD + _POLL + _BLOCK_AGREES + _VERDICT + _FENCE + "}"

# A partition of one warp has no block barrier: all lanes poll the word, and a vote makes the status the same for all.
_WARP_AGREES = "    vote.sync.all.pred reached, reached, 0xffffffff;"
WAIT_UNTIL_AT_LEAST_IN_WARP = "{" + _REGISTERS + _POLL + _WARP_AGREES + _VERDICT + _FENCE + "}"

# Waits until bulk-tensor stores of this thread are complete, not merely read from shared memory: required by a notify.
COMPLETE_BULK_STORES = "cp.async.bulk.wait_group 0; mov.u32 $0, 0;"

# Nanoseconds of the device's global timer, the same for all SMs.
READ_CLOCK = "mov.u64 $0, %globaltimer;"

# The low 32 bits of that clock: signed differences of up to two seconds are right.
READ_SHORT_CLOCK = "mov.u32 $0, %globaltimer_lo;"

# Sleeps for about the time left until that clock shows a time (`nanosleep` takes up to twice as long); not if it has
# passed. Operands: unused, the time.
SLEEP_UNTIL = """{
    .reg .b32 left;
    mov.u32 left, %globaltimer_lo;
    sub.s32 left, $1, left;
    max.s32 left, left, 0;
    nanosleep.u32 left;
    mov.u32 $0, 0;
}"""

# The address plus so many words of 16 bytes. Operands: words, address.
WORDS_BEHIND = "mad.wide.u32 $0, $1, 16, $2;"

# Thread 0 claims a tile for its block. Operands: result (the old counter; 0 in other threads), counter, thread.
# `inc` has a limit that ptxas cannot know: an `add` it would aggregate over the warp, and wait for the result at once
# (seen in SASS of Triton 3.6's ptxas).
CLAIM_IN_THREAD_0 = """{
    .reg .pred first;
    .reg .b32 most;
    setp.eq.u32 first, $2, 0;
    sub.u32 most, $2, 1;
    mov.u32 $0, 0;
    @first atom.relaxed.gpu.global.inc.u32 $0, [$1], most;
}"""


def fetch_tensor_maps(kernel: str, maps: int) -> str:
    """Return PTX by which one thread prefetches the tensor maps, the first parameters of a kernel. Operand: unused.

    Each is followed by four parameters: the sizes and strides of its matrix.
    """
    names = (f"{kernel}_param_{5 * at}" for at in range(maps))
    lines = (f"@first prefetch.param.tensormap [{name}];" for name in names)
    return "{ .reg .pred first; mov.u32 $0, %tid.x; setp.eq.u32 first, $0, 0; " + " ".join(lines) + " }"


# Programmatic dependent launch (memory/device/protocol.py): every thread executes it.
LAUNCH_DEPENDENTS = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
WAIT_FOR_PREVIOUS_KERNEL = "griddepcontrol.wait; mov.u32 $0, 0;"
# Operands: unused, an address, whether to prefetch its line.
PREFETCH_TO_L2 = "{ .reg .pred here; setp.ne.u32 here, $2, 0; @here prefetch.global.L2 [$1]; mov.u32 $0, 0; }"

BARRIER_BYTES = 1024


def bulk_shared_bytes(buffer_bytes: int) -> int:
    """Return the static shared memory of bulk copies with two such buffers."""
    return 2 * buffer_bytes + BARRIER_BYTES


def bulk_copy(buffer_bytes: int) -> str:
    """Return PTX that copies global memory through shared memory by bulk copies, all started by one thread.

    Operands: unused, target, source, bytes (a multiple of 16). One of two buffers is loaded while the other is stored,
    and loaded again once its store has read it. At the end all stores are complete, not merely read. The buffers are
    static shared memory, in front of Triton's dynamic one, whose tiles must begin at a multiple of 1024 bytes: so they
    take a multiple of it, too. The last 1024 bytes hold the mbarriers.
    MEASURED: a copy to a peer takes an SM 0.4 us for 4 KiB, 0.5 us for 8 KiB, however many are in flight (two H200s,
    2026-11-22): so two large buffers, not many small ones.
    """
    return _BULK_COPY.format(
        total=bulk_shared_bytes(buffer_bytes),
        barriers=2 * buffer_bytes,
        buffers=2,
        bytes=buffer_bytes,
        rounded=buffer_bytes - 1,
        ahead=2,
        unread=0,
    )


_BULK_COPY = """{{
    .reg .pred reached, other;
    .reg .b32 steps, ahead, done, size, buffer, full, phase;
    .reg .b64 offset, place;
    .shared .align 1024 .b8 staged[{total}];
    mov.u32 steps, %tid.x;
    setp.ne.u32 other, steps, 0;
    @other bra moved;
    mov.u32 ahead, 0;
prepare:
    mov.u32 full, staged;
    mad.lo.u32 full, ahead, 8, full;
    mbarrier.init.shared::cta.b64 [full+{barriers}], 1;
    add.u32 ahead, ahead, 1;
    setp.lt.u32 other, ahead, {buffers};
    @other bra prepare;
    fence.proxy.async.shared::cta;
    add.u32 steps, $3, {rounded};
    div.u32 steps, steps, {bytes};
    mov.u32 ahead, 0;
    mov.u32 done, 0;
load:
    setp.ge.u32 other, ahead, steps;
    @other bra store;
    sub.u32 size, ahead, done;
    setp.ge.u32 other, size, {ahead};
    @other bra store;
    cp.async.bulk.wait_group.read {unread};
    rem.u32 phase, ahead, {buffers};
    mov.u32 full, staged;
    mad.lo.u32 buffer, phase, {bytes}, full;
    mad.lo.u32 full, phase, 8, full;
    mul.lo.u32 size, ahead, {bytes};
    mul.wide.u32 offset, ahead, {bytes};
    sub.u32 size, $3, size;
    min.u32 size, size, {bytes};
    add.u64 place, $2, offset;
    add.u32 full, full, {barriers};
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], size;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [buffer], [place], size, [full];
    add.u32 ahead, ahead, 1;
    bra load;
store:
    setp.ge.u32 other, done, steps;
    @other bra complete;
    rem.u32 phase, done, {buffers};
    mov.u32 full, staged;
    mad.lo.u32 buffer, phase, {bytes}, full;
    mad.lo.u32 full, phase, 8, full;
    add.u32 full, full, {barriers};
    div.u32 phase, done, {buffers};
    and.b32 phase, phase, 1;
filled:
    mbarrier.try_wait.parity.shared::cta.b64 reached, [full], phase;
    @!reached bra filled;
    mul.lo.u32 size, done, {bytes};
    mul.wide.u32 offset, done, {bytes};
    sub.u32 size, $3, size;
    min.u32 size, size, {bytes};
    add.u64 place, $1, offset;
    cp.async.bulk.global.shared::cta.bulk_group [place], [buffer], size;
    cp.async.bulk.commit_group;
    add.u32 done, done, 1;
    bra load;
complete:
    cp.async.bulk.wait_group 0;
    mov.u32 ahead, 0;
forget:
    mov.u32 full, staged;
    mad.lo.u32 full, ahead, 8, full;
    mbarrier.inval.shared::cta.b64 [full+{barriers}];
    add.u32 ahead, ahead, 1;
    setp.lt.u32 other, ahead, {buffers};
    @other bra forget;
moved:
    mov.u32 $0, 0;
}}"""

# One packed message: 12 bytes of data and the epoch of its call, by one store of 16 bytes. Operands: unused, address,
# three data words, epoch, whether to store.
# SOURCE: PTX ISA 8.3 and later, memory consistency model: a `.b128` access is one operation on 128 bits, where a vector
# of four words would be four operations in any order. So a reader that sees the flag has the data, without a release.
PUSH_PACKED = """{
    .reg .pred here;
    .reg .b64 low, high;
    .reg .b128 message;
    setp.ne.u32 here, $6, 0;
    mov.b64 low, {$2, $3};
    mov.b64 high, {$4, $5};
    mov.b128 message, {low, high};
    @here st.relaxed.sys.global.b128 [$1], message;
    mov.u32 $0, 0;
}"""


def poll_packed(senders: int) -> str:
    """Return PTX that polls one message of each of so many senders, each in a part of its own, by every thread.

    Outputs: three data words of each sender, then the missing sender (its position plus one, 0: none). Inputs: address
    in part 0, bytes between parts, the part to skip, epoch, whether to poll, abort word, limit in ns. All messages and
    the abort word are loaded together: a poll costs one memory latency.
    """
    inputs = 3 * senders + 1
    address, stride, own, epoch, here, abort, limit = (f"${inputs + at}" for at in range(7))
    each = range(senders)
    lines = [
        ".reg .pred reached, other;",
        ".reg .b32 scratch, stop, missing;",
        ".reg .b64 start, now, low, high;",
        *(f".reg .b64 at{i}; .reg .b128 message{i}; .reg .b32 x{i}, y{i}, z{i}, flag{i};" for i in each),
        *(f"mov.b32 {name}{i}, 0;" for i in each for name in "xyz"),
        *(f"mov.b32 flag{i}, {epoch};" for i in each),
        f"setp.eq.u32 other, {here}, 0;",
        "@other bra decided;",
    ]
    for i in each:
        lines += [
            f"setp.ge.u32 other, {i}, {own};",
            f"selp.b32 scratch, {i + 1}, {i}, other;",
            "cvt.u64.u32 low, scratch;",
            f"mad.lo.u64 at{i}, low, {stride}, {address};",
        ]
    lines += ["mov.u64 start, %globaltimer;", "spin:"]
    lines += [f"ld.relaxed.sys.global.b128 message{i}, [at{i}];" for i in each]
    lines += [f"ld.relaxed.sys.global.b32 stop, [{abort}];", f"setp.eq.u32 reached, {epoch}, {epoch};"]
    for i in each:
        lines += [
            f"mov.b128 {{low, high}}, message{i};",
            f"mov.b64 {{x{i}, y{i}}}, low;",
            f"mov.b64 {{z{i}, flag{i}}}, high;",
            f"setp.eq.and.u32 reached, flag{i}, {epoch}, reached;",
        ]
    lines += [
        "@reached bra decided;",
        "setp.ne.b32 other, stop, 0;",
        "@other bra decided;",
        "mov.u64 now, %globaltimer;",
        "sub.u64 now, now, start;",
        f"setp.lt.u64 other, now, {limit};",
        "@other bra spin;",
        "decided:",
        "mov.b32 missing, 0;",
    ]
    for i in each:
        lines += [f"setp.ne.u32 other, flag{i}, {epoch};", f"@other mov.b32 missing, {i + 1};"]
    lines += [f"mov.b32 ${3 * i + at}, {name}{i};" for i in each for at, name in enumerate("xyz")]
    lines.append(f"mov.b32 ${3 * senders}, missing;")
    return "{\n" + "\n".join(f"    {line}" for line in lines) + "\n}"


def poll_packed_constraints(senders: int) -> str:
    """Return the constraints of the operands of `poll_packed`: outputs of 32 bits, then l l r r r l l."""
    return ",".join(["=&r"] * (3 * senders + 1) + ["l", "l", "r", "r", "r", "l", "l"])


def before_hopper(wait: str) -> str:
    """Return the wait without the proxy fence, for GPUs before sm_90."""
    return wait.replace(_FENCE, "")
