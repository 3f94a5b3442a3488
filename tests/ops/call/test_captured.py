"""The first call of its kind while a graph is captured, as CPU ranks can emulate it: nothing of it is captured here."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError
from overweave.ops.call import prepare
from tests.ranks import run_ranks


def captured(fails: bool, library_can: bool) -> list[str]:
    """For `run_ranks`: what a first call says, and whether it is right, where rank 1 cannot bind its plan."""
    bind: Any = prepare._bound
    tried: list[str] = []

    def bound(built: Any, choice: Any, problem: Any, where: Any) -> Any:
        tried.append(built.name)
        if fails and dist.get_rank() == 1 and len(tried) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return bind(built, choice, problem, where)

    x, w = torch.ones(4, 8), torch.ones(8, 8)
    library = "gloo" if library_can else "nccl"
    with (
        patch.object(prepare, "is_captured", lambda x: True),
        patch.object(prepare, "_bound", bound),
        patch.object(prepare, "NCCL", library),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        try:
            y = ow.all_gather_matmul(x, w, plan="push")
        except InputError as error:
            return [str(error), ""]
    right = torch.equal(y, torch.full((8, 8), 8.0))
    again = torch.equal(ow.all_gather_matmul(x, w, plan="push"), y)  # eagerly, by whatever was prepared
    return [" ".join(str(each.message) for each in told), *tried, str(right and again)]


def test_it_is_bound_as_any_other():
    for told in run_ranks(captured, 2, False, True):
        assert told == ["", "all_gather_matmul.push", "True"]


def test_all_ranks_take_the_library_where_one_cannot_bind():
    for words, *tried, right in run_ranks(captured, 2, True, True):
        assert "operation not permitted when stream is capturing" in words
        assert "a library computes it" in words
        assert tried == ["all_gather_matmul.push", "all_gather_matmul.sequential"]
        assert right == "True"


def test_all_ranks_refuse_it_where_the_library_cannot_be_captured():
    for words, _ in run_ranks(captured, 2, True, False):
        assert "not permitted when stream is capturing" in words
        assert "Make the same call once before the capture" in words
