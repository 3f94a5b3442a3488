"""Errors arrive whole where a worker process hands them on."""

from __future__ import annotations

import copy

import pytest

from overweave.errors import DirectiveError, InputError, OverweaveError, PeerTimeout, ScheduleRefused, nearest

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


def test_of_many_names_the_nearest_three_are_told_and_the_command_that_lists_all():
    many = ("push=1", "pull=2", "ring=3", "mesh=4", "islands=5")
    assert nearest("Names", "pul", many, "overweave show") == (
        "Names, nearest first: pull=2, push=1; `overweave show` lists all"
    )
    assert nearest("Names", "pul", many[:2], "overweave show") == "Names: push=1, pull=2"
    assert nearest("Names", "pul", (), "overweave show") == "Names: none"
    assert nearest("Names", "\n" * 10_000, many, "x") == "Names: `x` lists all, and none of them is near"
    assert nearest("Names", "ing", many, "x").startswith("Names, nearest first: ring=3")
