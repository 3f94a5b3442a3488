"""Every PTX string of overweave. Nothing else in the library spells an instruction.

Scalar inline assembly runs in every thread of a block, labels are local to the braces, and `$n` are the operands.
"""

# Operands: verdict, word, wanted value, abort word, time limit in ns.
# The poll is left with an acquire that saw the value, or void when the abort word is set or time is up. Values only
# grow and are compared by signed difference. The proxy fence orders later bulk-tensor loads behind the acquire too.
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
_VERDICT = """
    selp.b32 $0, 1, 0, reached;
    fence.proxy.async.global;
"""

# Thread 0 polls for its block. The block barrier makes the verdict the same for all threads and orders their later
# loads behind thread 0's acquire.
_ONLY_THREAD_0 = """
    mov.u32 scratch, %tid.x;
    setp.eq.u32 reached, scratch, scratch;
    setp.ne.u32 other, scratch, 0;
    @other bra decided;
"""
_BLOCK_AGREES = "    bar.red.and.pred reached, 0, reached;"
WAIT_UNTIL_AT_LEAST = "{" + _REGISTERS + _ONLY_THREAD_0 + _POLL + _BLOCK_AGREES + _VERDICT + "}"

# A partition of one warp has no block barrier: all lanes poll the word, and a vote makes their verdicts one.
_WARP_AGREES = "    vote.sync.all.pred reached, reached, 0xffffffff;"
WAIT_UNTIL_AT_LEAST_IN_WARP = "{" + _REGISTERS + _POLL + _WARP_AGREES + _VERDICT + "}"

# Bulk-tensor stores of this thread are complete, not merely read from shared memory: only then may they be announced.
COMPLETE_BULK_STORES = "cp.async.bulk.wait_group 0; mov.u32 $0, 0;"

# Nanoseconds of the device's global timer, the same for all SMs.
READ_CLOCK = "mov.u64 $0, %globaltimer;"
