"""A plan whose kernel this Triton cannot make: the call takes the library path and says so; a plan that was asked for
is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch

import overweave as ow
from overweave.errors import KernelUnavailable
from overweave.ir.plan import LIBRARY
from overweave.ops.call import prepare
from tests.ranks import run_ranks

REASON = "compile tile_kernel: ValueError: no such instruction"


def call(plan: str | None = None) -> torch.Tensor:
    y = ow.matmul_reduce_scatter(torch.full((8, 16), 2.0), torch.ones(16, 24), plan=plan)
    assert isinstance(y, torch.Tensor)
    return y


def answers() -> dict[str, Any]:
    """What calls say where only plans of a library can be bound."""
    original = prepare._bind

    def bind(plan: Any, *others: Any) -> Any:
        if any(one.engine != LIBRARY for one in plan.realization.engines):
            raise KernelUnavailable("compile tile_kernel", "ValueError: no such instruction", "Use another Triton")
        return original(plan, *others)

    with patch.object(prepare, "_bind", bind), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        is_right = all(bool((call() == 64).all()) for _ in range(2))
        said = [str(one.message) for one in seen]
        try:
            call("scatter")
            asked = ""
        except KernelUnavailable as error:
            asked = str(error)
    return {"is_right": is_right, "said": said, "asked": asked}


def test_a_call_takes_the_library_path_and_says_so_once() -> None:
    for found in run_ranks(answers, 2):
        assert found["is_right"]
        assert len(found["said"]) == 1
        assert REASON in found["said"][0]
        assert "takes the library path" in found["said"][0]
        assert REASON in found["asked"]


RENAMED = """
from triton.experimental.gluon import language
for name in ("barrier", "thread_barrier"):
    vars(language).pop(name, None)
from overweave.errors import KernelUnavailable
from overweave.runtime.backends import load
from overweave.runtime.kernel_calls import matmul
from overweave.runtime.library.calls import LibraryRun
try:
    load("hopper kernel")
except KernelUnavailable as error:
    print(error)
"""


@pytest.mark.slow
def test_a_name_that_triton_has_moved_is_said_and_leaves_the_rest_usable() -> None:
    command = [sys.executable, "-c", RENAMED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "use Triton's block_barrier: Triton 3." in result.stdout
    assert "has none of triton.experimental.gluon.language.barrier (3.7 on)" in result.stdout
    assert "Use a Triton from 3.6 to 3.9" in result.stdout
