"""The kernels of the protocol itself, with what each promises: the head of a call, the barrier of traces."""

from __future__ import annotations

from campaigns.lint.lint_case import Case, source_of
from overweave.compiler.ptx_lint.contract import Contract, Guard
from overweave.memory.device.protocol import WAIT_NUMBERS, begin_kernel, tell_kernel, wait_kernel
from overweave.memory.device.sync_clocks import stamp_kernel

BEGIN_BLOCK = 128
PROTOCOL = {"signals": "*i32", "words": "*i32", "limits": "*i64"}  # what every kernel that waits is given


def begin_case() -> Case:
    """The head of a call. Two looks: at all credits, and the alarm's.

    Three releases: the credit, and of the alarm its report and the peers' abort words.
    """
    numbers = dict.fromkeys(("signal_count", "rank", "world_size"), "i32")
    contract = Contract(
        waits=1,
        looks=2,
        releases=3,
        guarded=(Guard("words", ()),),
        announced=(Guard("*limits", ("*state",), optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
    )
    signature = {"state": "*i64", "claims": "*i32", **PROTOCOL, **numbers}
    return Case(source_of(begin_kernel, signature, {"BLOCK": BEGIN_BLOCK}, {"num_warps": 4}, ""), contract)


def tell_case() -> Case:
    """What a library call tells its peers: behind its kernels, which a boundary ends, and nothing of its own."""
    source = source_of(tell_kernel, {"words": "*i64"}, {"BLOCK": 32}, {"num_warps": 1}, "")
    return Case(source, Contract(releases=1, announced=(Guard("*words", ()),)))


def wait_case() -> Case:
    """A wait in front of what reads the data. Two looks: for who is late, and the alarm's."""
    contract = Contract(waits=1, looks=2, guarded=(Guard("signals", ()),), alarm=("words", "*limits"))
    source = source_of(wait_kernel, PROTOCOL | dict.fromkeys(WAIT_NUMBERS, "i32"), {}, {"num_warps": 1}, "")
    return Case(source, contract)


def stamp_case() -> Case:
    """The barrier that takes the time, for traces: nothing but words stands behind its signals."""
    contract = Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", ()),),
        announced=(Guard("*addresses", ()),),
        alarm=("words",),
    )
    tables = {"state": "*i64", "addresses": "*i64", "signals": "*i32", "words": "*i32", "limits": "*i64"}
    return Case(
        source_of(stamp_kernel, {**tables, "rank": "i32", "world_size": "i32"}, {}, {"num_warps": 4}, ""), contract
    )
