"""What surrounds a call: tracers, autocast, tensors without memory, and what stands in the group's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import overweave as ow
from overweave.errors import GroupError, InputError
from tests.ranks import run_ranks

TRACERS: dict[str, Callable[..., Any]] = {
    "make_fx": lambda call, *tensors: make_fx(call)(*tensors),
    "make_fx of fakes": lambda call, *tensors: make_fx(call, tracing_mode="fake")(*tensors),
    "make_fx before dispatch": lambda call, *tensors: make_fx(call, pre_dispatch=True)(*tensors),
    "torch.jit.trace": lambda call, *tensors: torch.jit.trace(call, tensors, check_trace=False),
}
NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 8), torch.ones(8, 16)


def alone(operator: Callable[..., Any]) -> Callable[..., Any]:
    """With its tensors only: some tracers ask for a value of every parameter."""
    return lambda x, w: operator(x, w)


def what_tracers_get() -> dict[str, str]:
    """What a tracer recorded, on data that it did not see: behind a call that prepared the signature."""
    told, (x, w) = {}, operands()
    for name in NAMES:
        operator = getattr(ow, name)
        operator(x, w)
        for tracer, trace in TRACERS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
                recorded = trace(alone(operator), x, w)
            nodes = recorded.code.count(f"ops.overweave.{name}") if hasattr(recorded, "code") else 1
            is_right = torch.equal(recorded(x + 1, w + 1), operator(x + 1, w + 1))
            told[f"{name}, {tracer}"] = f"{nodes} nodes, right: {is_right}"
    return told


@pytest.mark.slow
def test_tracers_record_one_node():
    for told in run_ranks(what_tracers_get, 2):
        assert len(told) == len(NAMES) * len(TRACERS)
        assert set(told.values()) == {"1 nodes, right: True"}, told


def what_is_refused() -> list[str]:
    x, w = operands()
    with FakeTensorMode():
        fakes = operands()
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (fakes, (x.to("meta"), w.to("meta"))):
            with pytest.raises(InputError) as raised:
                ow.all_gather_matmul(*arguments)
            told.append(raised.value.found)
        with pytest.raises(GroupError) as misplaced:
            ow.all_gather_matmul(x, w, torch.ones(16))
        told.append(f"{misplaced.value.found}: {misplaced.value.cure}")
    return told


def test_tensors_without_memory_or_in_the_groups_place_are_refused_without_a_warning():
    (told,) = run_ranks(what_is_refused, 1)
    assert "FakeTensor" in told[0]
    assert "meta" in told[1]
    assert "got Tensor: Pass one of these; a bias" in told[2]


def what_autocast_casts() -> list[str]:
    """Results of fp32 operands under autocast, beside those of operands that were cast."""
    told, (x, w) = [], operands()
    for name in NAMES:
        operator = getattr(ow, name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = operator(x, w, bias=torch.ones(16))
        wanted = operator(x.bfloat16(), w.bfloat16(), bias=torch.ones(16).bfloat16())
        told.append(f"{y.dtype} {torch.equal(y, wanted)}")
    return told


def test_autocast_casts_operands():
    assert run_ranks(what_autocast_casts, 2) == [["torch.bfloat16 True"] * len(NAMES)] * 2
