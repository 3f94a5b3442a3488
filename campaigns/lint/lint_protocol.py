"""The kernels of the protocol itself, with what each promises: the head of a call, the barrier of traces."""

from __future__ import annotations

from campaigns.lint.lint_case import PROTOCOL, SOME, WORDS, Case, case_of
from overweave.runtime.kernel_calls import call as calls
from tools.ptx_lint.contract import Guard


def begin_case() -> Case:
    """The head of a call. Two looks: at all credits, and the alarm's.

    Three releases: the credit, and of the alarm its report and the peers' abort words.
    """
    return case_of(
        calls.prologue_call(WORDS, PROTOCOL, SOME),
        "",
        waits=1,
        looks=2,
        releases=3,
        guarded=(Guard("words", ()),),
        announced=(Guard("*limits", ("*state",), optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
    )


def tell_case() -> Case:
    """What a library call tells its peers: behind its kernels, which a boundary ends, and nothing of its own."""
    call = calls.notify_call((0,) * 4, WORDS.device)
    return case_of(call, "", releases=1, announced=(Guard("*words", ()),))


def wait_case() -> Case:
    """A wait in front of what reads the data. Two looks: for who is late, and the alarm's."""
    call = calls.wait_call(PROTOCOL, (SOME,) * 5, SOME, SOME)
    return case_of(call, "", waits=1, looks=2, guarded=(Guard("signals", ()),), alarm=("words", "*limits"))


def stamp_case() -> Case:
    """The barrier that takes the time, for traces: nothing but words stands behind its signals."""
    words = [WORDS.state, WORDS.limits, *PROTOCOL[:3]]
    return case_of(
        calls.stamp_call(words, WORDS.group.rank, WORDS.group.world_size),
        "",
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", ()),),
        announced=(Guard("*addresses", ()),),
        alarm=("words",),
    )
