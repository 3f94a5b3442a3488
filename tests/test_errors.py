"""Errors arrive whole where a worker process hands them on."""

from __future__ import annotations

import copy

import pytest

from overweave.errors import DirectiveError, InputError, OverweaveError, PeerTimeout, ScheduleRefused

ERRORS = (
    InputError("call", "a wrong shape", "Give another"),
    PeerTimeout("call 3", "rank 1 is late", ""),
    DirectiveError(("kernel.py", 7, "# @overweave.axis"), "no such axis", "Name one"),
    ScheduleRefused("plan", ("a race", "a gap")),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_rebuilt_as_it_was(error: OverweaveError):
    again = copy.copy(error)  # by what a pickle of it would say
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
