"""Rules about what the compiler made of a kernel: scopes, spills, tensor cores, instructions that must not appear."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.ptx_lint.contract import Finding
from tools.ptx_lint.ptx import Instruction
from tools.ptx_lint.subject import Subject

SWIZZLE_BYTES = 1024
_STATIC_SHARED = re.compile(r"^\s*\.shared\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]", re.M)
_TRAPS = frozenset(("trap", "brkpt"))


def system_scope(subject: Subject) -> Iterator[Finding]:
    """Every ordered or atomic access outside of private memory has system scope: smaller ones do not reach a peer."""
    for access in subject.shared:
        if access.order in ("weak", "volatile", "mmio") or access.scope == "sys":
            continue
        yield subject.finding(
            "system-scope",
            access.instruction,
            f"{access.instruction.opcode} has {access.scope or 'no'} scope, which ends at this GPU",
            'Pass scope="sys", or declare the pointer private',
        )


def spills(subject: Subject) -> Iterator[Finding]:
    """Registers suffice: nothing lives in local memory."""
    resources = subject.compiled.resources
    if resources.spill_bytes or resources.stack_bytes:
        yield subject.finding(
            "spills",
            None,
            f"{resources.spill_bytes} bytes spilled, {resources.stack_bytes} of stack, {resources.registers} registers",
            "Use smaller tiles, fewer stages or more warps",
        )


def shared_base(subject: Subject) -> Iterator[Finding]:
    """Static shared memory leaves what lies behind it aligned: tiles that swizzles speak of begin at such places."""
    arrays = _STATIC_SHARED.findall(subject.compiled.ptx)
    if sum(map(int, arrays)) % SWIZZLE_BYTES:
        yield subject.finding(
            "shared-base",
            None,
            f"static shared memory of {' + '.join(arrays)} bytes shifts the tiles behind it",
            f"Make it a multiple of {SWIZZLE_BYTES} bytes",
        )


def tensor_cores(subject: Subject) -> Iterator[Finding]:
    """wgmma is there where it was promised, and as many of its groups as promised stay in flight."""
    contract, rule = subject.contract, "wgmma"
    multiplies = [item for item in subject.function.instructions if item.parts[:2] == ("wgmma", "mma_async")]
    if contract.wgmma and not multiplies:
        yield subject.finding(rule, None, "no wgmma instruction", "Check block shapes, warps and operand dtypes")
    if not contract.depth or not multiplies:
        return
    depth = max((_depth(subject, item) for item in multiplies), default=0)
    if depth < contract.depth:
        yield subject.finding(
            rule,
            multiplies[0],
            f"the main loop waits until {depth} groups are in flight, {contract.depth} promised: it is not pipelined",
            "Keep barriers and inline assembly out of the main loop, and the loop nest un-flattened",
        )
    for warning in subject.compiled.resources.warnings:
        if "wgmma" in warning:
            yield subject.finding(rule, multiplies[0], f"ptxas says {warning}", "Keep accumulators in registers")


def _depth(subject: Subject, multiply: Instruction) -> int:
    """How many groups the waits in the loop around an instruction leave in flight; 0 outside of loops."""
    loop = subject.graph.innermost(subject.graph.block_of[multiply.index])
    if loop is None:
        return 0
    inside = (item for block in loop.blocks for item in subject.graph.blocks[block].instructions)
    waits = [int(item.operands[0]) for item in inside if item.parts[:2] == ("wgmma", "wait_group")]
    return min(waits, default=0)


def forbidden(subject: Subject) -> Iterator[Finding]:
    """No trap, which would kill the whole context, and no multicast."""
    for item in subject.function.instructions:
        asserts = item.root == "call" and any("__assertfail" in operand for operand in item.operands)
        if item.root in _TRAPS or asserts:
            yield subject.finding(
                "forbidden-instruction", item, f"{item.opcode} kills the context", "Report errors by word and verdict"
            )
        if item.root == "multimem" or "multimem" in item.parts:
            yield subject.finding(
                "forbidden-instruction", item, f"{item.opcode} uses NVLink multicast", "Send to each peer by itself"
            )
