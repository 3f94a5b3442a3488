"""What prepared calls keep: nothing of the caller's, whose tensors may be freed between calls, and no plan.

What tests before these keep is not looked through (tests/conftest.py).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from campaigns.host.host_cases import CASES, Case, call_of
from campaigns.host.host_path import SIZES, ready
from overweave.ir.plan import Plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with ready() as group, torch.no_grad():
        yield group


def tensors_of(case: Case, group: dist.ProcessGroup) -> list[weakref.ref[torch.Tensor]]:
    """The tensors of the first call of its kind, and its results."""
    call = call_of(case, group, SIZES)
    results = call()
    found: list[torch.Tensor] = []
    for each in (*call.args, *call.keywords.values(), results):  # type: ignore[attr-defined]
        parts = each if isinstance(each, list | tuple) else [each]
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(found) > 2
    return [weakref.ref(tensor) for tensor in found]


def plans() -> list[Plan]:
    return [each for each in gc.get_objects() if type(each) is Plan]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.nightly if at % 2 else (), id=str(case)) for at, case in enumerate(CASES)],
)
def test_tensors_of_the_first_call_are_not_kept(case: Case, group: dist.ProcessGroup):
    first = tensors_of(case, group)
    tensors_of(case, group)
    gc.collect()
    assert [tensor().shape for tensor in first if tensor() is not None] == []  # type: ignore[union-attr]
    assert not plans()
