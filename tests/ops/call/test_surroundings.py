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
    """Behind a call that prepared the signature, which nothing else is asked of again."""
    told = {}
    for name in NAMES:
        operator = getattr(ow, name)
        operator(*operands())
        for tracer, trace in TRACERS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
                try:
                    trace(alone(operator), *operands())
                    told[f"{name}, {tracer}"] = "traced"
                except InputError as error:
                    told[f"{name}, {tracer}"] = error.found
    return told


def test_whoever_records_is_refused():
    for told in run_ranks(what_tracers_get, 2):
        assert len(told) == len(NAMES) * len(TRACERS)
        assert {name: found for name, found in told.items() if "a tracer records it" not in found} == {}


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


def what_autocast_is_told() -> dict[str, list[str]]:
    told = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = (each.to(dtype) for each in operands())
        with warnings.catch_warnings(record=True) as said, torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("always")
            assert ow.all_gather_matmul(x, w).dtype == dtype
        told[str(dtype)] = [f"{each.filename} {each.message}" for each in said]
    return told


def test_where_autocast_does_nothing_it_is_said():
    (told,) = run_ranks(what_autocast_is_told, 1)
    assert told["torch.bfloat16"] == []
    (said,) = told["torch.float32"]
    assert "autocast does not reach it, and it computes in torch.float32" in said
    assert "test_surroundings.py" in said
