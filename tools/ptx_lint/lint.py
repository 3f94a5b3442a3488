"""The PTX lint: the mistakes of memory order, waiting and code generation that no emulator can see.

It is given a compiled kernel and the kernel's own contract, and knows no kernel of ours: a user's has the same rights.
What it cannot see: which element of an array a pointer names (an order between two chunks of one buffer is the
schedule's proof, ir/verify), values (that the epoch waited for is the right one), anything inside a call, and what
threads of one block pass one another through shared memory, which is the compiler's affair.

    findings = lint(compile_kernel(source), contract)

Rules, by the name a finding carries (the functions of RULES say what each asks for); most ask one question (waits.py):

    barrier-before-release   order       a block barrier between data and each release
    bulk-completion                      complete bulk stores before a release
    proxy-fence                          between generic and bulk accesses to the same data
    guarded-order            turns       no load of guarded data above its wait
                             partitions  nor where another partition waits, unless it passes that on
    announced-order                      no store of announced data below its release
    wait-loop                waits       a wait is a loop that ends in an acquire
    deadline                             and it is bounded
    declared-counts                      as many waits and releases as the source has
    undeclared-signal                    each through a pointer the contract names
    packed-messages          packed      a message and its flag are one access, looked for in a bounded loop
    sounded-alarm            alarm       a void wait is reported to the host, and to every peer
    counted-shares           counted     shares are stored before they are counted, and read behind that
    system-scope             build       no smaller scope where peers are told
    spills, shared-base, wgmma, forbidden-instruction   what the compiler made of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from tools.aot import Compiled
from tools.ptx_lint.alarm import sounded_alarm
from tools.ptx_lint.build import forbidden, shared_base, spills, system_scope, tensor_cores
from tools.ptx_lint.contract import Contract, Finding
from tools.ptx_lint.order import barrier_before_release, bulk_completion, proxy_fence
from tools.ptx_lint.packed import counted_shares, packed_messages
from tools.ptx_lint.partitions import passed_on
from tools.ptx_lint.subject import Subject
from tools.ptx_lint.turns import announced_order, guarded_order
from tools.ptx_lint.waits import deadline, declared_counts, wait_loop

Rule = Callable[[Subject], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    barrier_before_release,
    system_scope,
    wait_loop,
    bulk_completion,
    proxy_fence,
    guarded_order,
    passed_on,
    announced_order,
    declared_counts,
    deadline,
    packed_messages,
    sounded_alarm,
    counted_shares,
    spills,
    shared_base,
    tensor_cores,
    forbidden,
)


def lint(compiled: Compiled, contract: Contract) -> tuple[Finding, ...]:
    """Every rule that the kernel breaks, in the order of RULES. Empty if it keeps its contract.

    Raises InputError for a contract that names no argument of the kernel, MachineError for PTX that cannot be followed.
    """
    subject = Subject(compiled, contract)
    merged: dict[tuple[str, str], list[Finding]] = {}
    for rule in RULES:
        for finding in rule(subject):
            merged.setdefault((finding.rule, finding.what), []).append(finding)
    return tuple(_first(findings) for findings in merged.values())


def _first(findings: list[Finding]) -> Finding:
    """One finding for all places with the same fault: the first, and how many more."""
    if len(findings) == 1:
        return findings[0]
    return replace(findings[0], what=f"{findings[0].what} (and at {len(findings) - 1} more places)")
