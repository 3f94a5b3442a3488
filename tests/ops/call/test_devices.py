"""Calls on tensors of another GPU than the current one go to theirs, with everything that was passed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import overweave as ow
from campaigns.lint.authored_cases import KERNELS
from overweave.ops.author.compile import compile
from overweave.ops.call import devices
from tests.ranks import run_ranks

W = torch.arange(32.0).view(8, 4)
X = torch.arange(24.0).view(3, 8)
ONES = torch.ones(4)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two of them; `now` is the current one."""
    found = SimpleNamespace(now=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(devices, "cuda_getDevice", lambda: found.now)
    return found


def test_a_tensor_is_away_where_another_gpu_is_current(gpus: Any) -> None:
    with FakeTensorMode():
        first, theirs = (torch.empty(2, device=f"cuda:{number}") for number in range(2))
    assert [devices.is_away(one) for one in (first, theirs, X, "x")] == [False, True, False, False]
    gpus.now = 1
    assert [devices.is_away(one) for one in (first, theirs)] == [True, False]


def calls() -> list[Callable[[], object]]:
    """Every operator, with all that it takes."""
    given: dict[str, Any] = {"bias": ONES, "activation": "silu", "residual": torch.ones(3, 4)}
    norm = ow.RmsNorm(ONES, eps=1e-5)
    return [
        lambda: ow.all_gather_matmul(X, W, None, m=3, **given, return_gathered=True, plan="sequential"),
        lambda: ow.matmul_reduce_scatter(X, W, None, **given, plan="sequential"),
        lambda: ow.matmul_all_reduce(X, W, None, norm=norm, plan="sequential"),
        lambda: ow.matmul_all_reduce([X, X], [W, W], plan="sequential"),
    ]


def go_where_tensors_lie() -> list[list[bool]]:
    """Of each operator: whether it was sent to its tensors, once, and gave there what it gives here."""
    return [_goes(call) for call in calls()]


def _goes(call: Callable[[], Any]) -> list[bool]:
    here, sent = call(), list[torch.device]()

    def run_on(device: torch.device, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        sent.append(device)
        return call(*arguments, **options)

    with patch.multiple(
        "overweave.ops.dispatch.call", is_away=lambda one: isinstance(one, torch.Tensor) and not sent, run_on=run_on
    ):
        there = call()
    pairs = zip(*([one] if isinstance(one, torch.Tensor) else one for one in (here, there)), strict=True)
    return [sent == [X.device], *(torch.equal(one, other) for one, other in pairs)]


@pytest.mark.slow
def test_all_that_was_passed_goes_along() -> None:
    found = run_ranks(go_where_tensors_lie, 1)
    assert found == [[[True] * 3, [True] * 2, [True] * 3, [True] * 2]]


def test_a_compiled_kernel_goes_where_its_first_tensor_lies(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, sent = compile(f"{KERNELS / 'matmul'}.py:matmul_kernel", "all_gather.push"), []
    module = sys.modules["overweave.ops.author.compile"]
    monkeypatch.setattr(module, "run_on", lambda device, *call, **options: sent.append((device, *call, options)))
    with FakeTensorMode():
        a, b = (torch.empty(2, 2, device=f"cuda:{number}") for number in (1, 0))
    fused(7, a, b, M=5, group="theirs")
    assert sent == [(a.device, fused, 7, a, b, {"M": 5, "group": "theirs"})]


def test_the_current_gpu_is_put_back() -> None:
    with devices.current(torch.device("cpu")) as nothing:
        assert nothing is None
    assert isinstance(devices.current(torch.device("cuda", 1)), torch.cuda.device)
