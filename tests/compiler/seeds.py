"""Violations, each planted in the kept PTX of a kernel that is right: what the lint must not overlook."""

from __future__ import annotations

from typing import NamedTuple

RELEASE = r"@%p\d+ atom\.global\.sys\.release\.add\.u32 [^;]*;\n"
BARRIER = r"bar\.sync 0;\n"
VERDICT = r"bar\.red\.and\.pred p, 0, p;\n"
FENCE = r"fence\.proxy\.async\.global;\n"
SPIN_AGAIN = r"@p bra spin;\n"
REPORT = r"@%p3 atom\.global\.sys\.release\.exch\.b32 [^;]*;\n"
SLOT_LOAD = "ld.global.b32 %r999, [%rd999];\n"
SLOTS = "ld.param.b64 %rd999, [reduce_waits_param_0];\n"


class Seed(NamedTuple):
    """`rule` must find what the replacements `(pattern, replacement[, count])` do to `kernel`."""

    rule: str
    fault: str
    kernel: str
    changes: tuple[tuple[str, str] | tuple[str, str, int], ...]


SEEDS = (
    Seed("barrier-before-release", "no barrier after plain stores", "matmul_stores",
         ((rf"(st\.global\.v4[^;]*;\n){BARRIER}", r"\1"),)),
    Seed("barrier-before-release", "a barrier that not every thread reaches", "matmul_stores",
         ((rf"(st\.global\.v4[^;]*;\n){BARRIER}", r"\1@%p3 bar.sync 0;\n"),)),
    Seed("barrier-before-release", "a barrier of one half of the block", "matmul_stores",
         ((rf"(st\.global\.v4[^;]*;\n){BARRIER}", r"\1bar.sync 0, 64;\n"),)),
    Seed("barrier-before-release", "a store slipped below the barrier", "matmul_stores",
         ((rf"(@%p36 st\.global\.v4[^;]*;\n)({BARRIER})", r"\2\1"),)),
    Seed("barrier-before-release", "a branch around the barrier", "matmul_stores",
         ((rf"({BARRIER})(setp\.gt\.s32 %p43)", r"@%p3 bra around;\n\1around: \2"),)),
    Seed("barrier-before-release", "bulk stores complete in one thread only", "matmul_bulk",
         ((rf"(wait_group 0;[^;]*;\n){BARRIER}", r"\1"),)),
    Seed("barrier-before-release", "credit given while the pad is being zeroed", "begin",
         ((rf"(st\.global\.b32[^;]*;\n){BARRIER}", r"\1"),)),
    Seed("sounded-alarm", "no block claims the alarm", "sounds",
         ((r"@%p3 atom\.global\.acq_rel\.sys\.cas\.b32 %r6[^;]*;\n", ""),)),
    Seed("sounded-alarm", "the report is released by nobody", "sounds", ((REPORT, ""),)),
    Seed("sounded-alarm", "a relaxed exchange is no release", "sounds", ((r"release\.exch", "relaxed.exch"),)),
    Seed("sounded-alarm", "the report's flag is plainly stored", "sounds",
         ((REPORT, "@%p3 st.global.b32 [ %rd8 + 0 ], { %r8 };\n"),)),
    Seed("sounded-alarm", "no peer is told", "sounds",
         ((r"@%p3 atom\.global\.acq_rel\.sys\.cas\.b32 %r12[^;]*;\n", ""),)),
    Seed("sounded-alarm", "peers are told and the host is not yet", "sounds",
         ((rf"({REPORT})(.*)(\$L__BB0_5: ?\n)", r"\2\1\3"),)),
    Seed("sounded-alarm", "a word of the report slipped below its release", "sounds",
         ((rf"(@%p3 st\.global\.b32[^;]*;\n)(bar\.sync 0;\n[^;]*;\n{REPORT})", r"\2\1"),)),
    Seed("sounded-alarm", "the abort word is swapped where the report lies", "sounds",
         ((r"%r6, \[ %rd4", "%r6, [ %rd8"),)),
    Seed("barrier-before-release", "a report before all threads have stored it", "sounds",
         ((rf"(@%p3 st\.global\.b32[^;]*;\n){BARRIER}", r"\1"),)),
    Seed("system-scope", "a release at gpu scope", "matmul_stores", ((r"sys\.release", "gpu.release"),)),
    Seed("system-scope", "an atomic with PTX's own defaults", "matmul_stores", ((r"sys\.release\.", ""),)),
    Seed("system-scope", "an acquire at gpu scope", "reduce_waits", ((r"acquire\.sys", "acquire.gpu"),)),
    Seed("system-scope", "an abort word read at block scope", "reduce_waits", ((r"relaxed\.sys", "relaxed.cta"),)),
    Seed("wait-loop", "a relaxed poll", "reduce_waits", ((r"ld\.acquire\.sys", "ld.relaxed.sys"),)),
    Seed("wait-loop", "a volatile poll", "reduce_waits", ((r"ld\.acquire\.sys", "ld.volatile"),)),
    Seed("wait-loop", "one look, no loop", "reduce_waits", ((SPIN_AGAIN, ""),)),
    Seed("wait-loop", "left while the value is too small", "reduce_waits", ((r"setp\.ge\.s32", "setp.lt.s32"),)),
    Seed("wait-loop", "left by chance", "reduce_waits",
         ((SPIN_AGAIN, "@p bra again;\nbra void;\nagain: @%p1 bra void;\nbra spin;\n"),)),
    Seed("wait-loop", "left before the first look", "reduce_waits",
         ((r"spin: ", "spin: setp.ge.s32 p, tid, 0;\n@p bra seen;\n"), (r"(sub\.s32[^;]*;)", r"\1\nmov.u32 tid, w;"))),
    Seed("wait-loop", "the other threads do not hear of it", "reduce_waits", ((VERDICT, ""),)),
    Seed("bulk-completion", "only the reads of the bulk store are complete", "matmul_bulk",
         ((r"wait_group 0;", "wait_group.read 0;"),)),
    Seed("bulk-completion", "the last group may be under way", "matmul_bulk", ((r"wait_group 0;", "wait_group 1;"),)),
    Seed("bulk-completion", "never committed", "matmul_bulk", ((r"cp\.async\.bulk\.commit_group;\n", ""),)),
    Seed("bulk-completion", "a branch around the wait", "matmul_bulk",
         ((r"cp\.async\.bulk\.wait_group 0;", "@%p6 bra around;\ncp.async.bulk.wait_group 0;\naround: "),)),
    Seed("proxy-fence", "no fence after the wait", "matmul_waits", ((FENCE, ""),)),
    Seed("proxy-fence", "a fence of the wrong memory", "matmul_waits",
         ((r"fence\.proxy\.async\.global", "fence.proxy.async.shared::cta"),)),
    Seed("proxy-fence", "a fence in the polling thread only", "matmul_waits",
         ((rf"({VERDICT})([^;]*;\n)({FENCE})", r"\3\1\2"),)),
    Seed("proxy-fence", "a fence in some threads", "matmul_waits", ((FENCE, "@p fence.proxy.async.global;\n"),)),
    Seed("proxy-fence", "shared stores not handed to the bulk store", "matmul_bulk",
         ((r"(stmatrix[^;]*;\n)fence\.proxy\.async\.shared::cta;\n", r"\1"),)),
    Seed("guarded-order", "a load above the wait", "reduce_waits",
         ((r"(mov\.u32 v, 1;\n)", SLOTS + SLOT_LOAD + r"\1"),)),
    Seed("guarded-order", "a load by the threads that do not poll", "reduce_waits",
         ((r"@poller bra seen;", "@poller bra early;"), (r"seen: ", f"bra seen;\nearly: {SLOTS}{SLOT_LOAD}seen: "))),
    Seed("guarded-order", "a branch around the wait", "reduce_waits",
         ((r"(mov\.u32 v, 1;\n)", r"@%p1 bra fence;\n\1"), (rf"({FENCE})", r"fence: \1"))),
    Seed("guarded-order", "the next tile's load above its wait", "matmul_waits",
         ((r"(setp\.lt\.s32 %p\d+, %r\d+, %r\d+;\n@%p\d+ bra \$L__BB0_2;)",
           r"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
           r"[%r42], [%rd10, {%r43, %r76}], [%r39];\n\1"),)),
    Seed("announced-order", "a store below the release", "matmul_stores",
         ((r"(@%p36 st\.global\.v4[^;]*;\n)(.*?)(" + RELEASE + ")", r"\2\3\1"),)),
    Seed("announced-order", "a branch around the release", "matmul_stores",
         ((rf"({RELEASE})", r"@%p3 bra around;\n\1around: "),)),
    Seed("announced-order", "a signal raised without release", "matmul_stores", ((r"sys\.release", "sys.relaxed"),)),
    Seed("announced-order", "the pad zeroed after the credit", "begin",
         ((r"(@%p1 st\.global[^;]*;\n)(.*)ret;", r"\2\1ret;"),)),
    Seed("declared-counts", "a wait deleted", "reduce_waits",
         ((r"\{\n\.reg \.pred poller.*?\n\}\n", "mov.u32 %r1, 1;\n"),)),
    Seed("declared-counts", "a wait doubled", "reduce_waits", ((r"(\{\n\.reg \.pred poller.*?\n\}\n)", r"\1\1"),)),
    Seed("declared-counts", "a release deleted", "matmul_stores", ((RELEASE, ""),)),
    Seed("declared-counts", "a release doubled", "matmul_stores", ((f"({RELEASE})", r"\1\1"),)),
    Seed("deadline", "no look at the clock", "reduce_waits", ((SPIN_AGAIN, "bra.uni spin;\n"),)),
    Seed("deadline", "the clock read before the loop", "reduce_waits",
         ((r"mov\.u64 t1, %globaltimer;\nsub", "sub"), (r"(mov\.u64 t0, %globaltimer;\n)", r"\1mov.u64 t1, t0;\n"))),
    Seed("deadline", "no look at the abort word", "reduce_waits", ((r"@p bra void;\n", ""),)),
    Seed("deadline", "the abort word read weakly", "reduce_waits", ((r"ld\.relaxed\.sys", "ld"),)),
    Seed("deadline", "the abort word read before the loop", "reduce_waits",
         ((r"(ld\.relaxed\.sys[^;]*;\n)", ""), (r"spin: ", "ld.relaxed.sys.global.u32 v, [%rd2];\nspin: "),
          (r"setp\.ne\.u32 p, w, 0;\n@p bra void", "setp.ne.u32 p, v, 0;\n@p bra void"))),
    Seed("wgmma", "every step waits for its own product", "matmul_waits",
         ((r"wgmma\.wait_group\.sync\.aligned 1", "wgmma.wait_group.sync.aligned 0"),)),
    Seed("wgmma", "no tensor cores", "matmul_waits", ((r"wgmma\.mma_async[^;]*;\n", ""),)),
    Seed("forbidden-instruction", "a trap", "matmul_stores", ((r"ret;", "trap;\nret;"),)),
    Seed("forbidden-instruction", "an assertion", "matmul_stores",
         ((r"ret;", "call.uni __assertfail, (param0);\nret;"),)),
    Seed("forbidden-instruction", "a multicast store", "begin",
         ((r"ret;", "multimem.red.release.sys.global.add.u32 [%rd8], 1;\nret;"),)),
    Seed("undeclared-signal", "a release through another argument", "matmul_stores",
         ((r"\[ %rd24 \+ 0 \]", "[ %rd2 + 0 ]"),
          (r"(mul\.lo\.s32)", r"ld.param.b64 %rd2, [matmul_notifies_param_10];\n\1", 1))),
    Seed("undeclared-signal", "an acquire through an untraceable pointer", "reduce_waits",
         ((r"ld\.acquire\.sys\.global\.u32 w, \[[^;]*;", "ld.acquire.sys.global.u32 w, [%rd998];"),)),
)  # fmt: skip
