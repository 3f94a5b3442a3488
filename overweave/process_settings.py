"""What holds for all calls of this process: `ow.settings`, and the environment variables that it begins with.

    ow.settings(batch_invariant=True)                    # from now on
    with ow.settings(sm_margin=16): ...                  # until the block ends

variable                      setting             values
OVERWEAVE_BATCH_INVARIANT     batch_invariant     0, 1
VLLM_BATCH_INVARIANT          batch_invariant     0, 1: vLLM's own
OVERWEAVE_SM_MARGIN           sm_margin           a number of SMs
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from overweave.errors import InputError

MOST_MARGIN = 1 << 10
BATCH_INVARIANT, SM_MARGIN = ("OVERWEAVE_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"), "OVERWEAVE_SM_MARGIN"


class ProcessSettings(NamedTuple):
    """The values that hold. A call's key has them, so that a call that was prepared under others is prepared again."""

    batch_invariant: bool = False
    sm_margin: int = 0

    def __str__(self) -> str:
        return f"batch_invariant={self.batch_invariant} sm_margin={self.sm_margin}"

    @property
    def words(self) -> str:
        """Return what is set, as ranks compare it; empty where all is as it comes."""
        values = zip(self._fields, self, self._field_defaults.values(), strict=True)
        return "".join(f" under {name}={value}" for name, value, default in values if value != default)


def of_environment(variables: Mapping[str, str]) -> ProcessSettings:
    """Return the settings that environment variables ask for. Raises InputError."""
    for name in BATCH_INVARIANT:
        if variables.get(name, "") not in ("", "0", "1"):
            raise InputError(name, f"got {variables[name][:40]!r}", "Set it to 0 or 1")
    margin = variables.get(SM_MARGIN, "") or "0"
    if not (margin.isascii() and margin.isdecimal() and int(margin[:9]) <= MOST_MARGIN):
        raise InputError(SM_MARGIN, f"got {margin[:40]!r}", f"Set it to a number of SMs, 0 to {MOST_MARGIN}")
    return ProcessSettings(any(variables.get(name) == "1" for name in BATCH_INVARIANT), int(margin))


HELD: list[ProcessSettings] = []  # at most one: read from the environment when it is first asked for


def current() -> ProcessSettings:
    """Return the settings of this process. Raises InputError for a variable that has no such value."""
    if not HELD:
        HELD.append(of_environment(os.environ))
    return HELD[0]


class settings:  # noqa: N801 - called as a function
    """Set what holds for all later calls of this process; as a context manager, until the block ends.

    batch_invariant: the bits of a token do not depend on how many other tokens are in the batch. Operators take plans
    alone that multiply in one order over k and add in one order over ranks for all numbers of rows; others, by name,
    are refused. sm_margin: SMs that our kernels of tiles leave free, for kernels of others beside them.
    What is left out stays as it is: `print(ow.settings())` shows all. Ranks of a group must agree, or raise
    RankMismatch at their next call. Experts, attention and authors' kernels are not batch-invariant, and keep the
    margin of their first call. The variables OVERWEAVE_BATCH_INVARIANT (or VLLM_BATCH_INVARIANT) and
    OVERWEAVE_SM_MARGIN say what holds at first. Raises InputError.
    """

    def __init__(self, *, batch_invariant: bool | None = None, sm_margin: int | None = None) -> None:
        self._before = current()
        if not isinstance(batch_invariant, bool | None):
            raise InputError("settings", f"batch_invariant={batch_invariant!r:.40}", "Pass True or False")
        is_number = isinstance(sm_margin, int) and not isinstance(sm_margin, bool)
        if sm_margin is not None and not (is_number and 0 <= sm_margin <= MOST_MARGIN):
            raise InputError("settings", f"sm_margin={sm_margin!r:.40}", f"Pass a number of SMs, 0 to {MOST_MARGIN}")
        before = self._before
        HELD[0] = ProcessSettings(
            before.batch_invariant if batch_invariant is None else batch_invariant,
            before.sm_margin if sm_margin is None else sm_margin,
        )

    def __enter__(self) -> ProcessSettings:
        return current()

    def __exit__(self, *failure: object) -> None:
        HELD[0] = self._before

    def __str__(self) -> str:
        return str(current())
