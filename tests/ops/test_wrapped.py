"""Tensors that are not what they look like: refused with words on every rank, and the group goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

import overweave as ow
from overweave.errors import OverweaveError
from tests.ops.calls import is_right, small_call
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
Act = Callable[[torch.Tensor], object]


def as_dtensor(act: Act, x: torch.Tensor) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    act(DTensor.from_local(x, dist.init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]))


def with_tangent(act: Act, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        act(forward_ad.make_dual(x, x))


WAYS: dict[str, tuple[Callable[[Act, torch.Tensor], object], str]] = {
    "dtensor": (as_dtensor, "got DTensor, which"),
    "vmap": (lambda act, x: torch.vmap(act)(torch.stack([x, x])), "torch.func wraps it"),
    "grad": (lambda act, x: torch.func.grad(act)(x), "torch.func wraps it"),
    "jvp": (lambda act, x: torch.func.jvp(act, (x,), (x,)), "torch.func wraps it"),
    "tangent": (with_tangent, "it has a tangent"),
}


def refused(way: str, is_known: bool) -> list[str]:
    """What the operators say to such an x, w, and bias; on groups that know the same call of plain tensors, or not."""
    x, w, told = torch.ones(4, 8), torch.ones(8, 16), []
    for name in OPERATORS:
        operator = getattr(ow, name)
        plain = {"x": x, "w": w, "bias": torch.ones(16)}
        for wrapped in plain:

            def call(given: torch.Tensor, operator=operator, wrapped=wrapped, plain=plain) -> torch.Tensor:
                x, w, bias = (plain | {wrapped: given}).values()
                return operator(x, w, bias=bias)

            if is_known:
                call(plain[wrapped])
            try:
                WAYS[way][0](call, plain[wrapped])
                told.append("nothing was raised")
            except OverweaveError as error:
                told.append(f"{type(error).__name__}: {error}")
    return [*told, *(str(is_right(small_call(name, 8))) for name in OPERATORS)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_on_every_rank(way: str, is_known: bool):
    for told in run_ranks(partial(refused, way, is_known), 2):
        assert told[9:] == ["True"] * 3
        for error in told[:9]:
            assert error.startswith("InputError: ")
            assert WAYS[way][1] in error


def waited_for() -> list[bool]:
    """What a functional collective returned is waited for, as x, as w, and as a bias."""
    x, w, told = torch.ones(4, 8), torch.ones(8, 16), []
    for name in OPERATORS:
        plain = {"x": x, "w": w, "bias": torch.ones(16)}
        operator = getattr(ow, name)
        whole = operator(x, w, bias=plain["bias"])
        for _ in range(2):  # on a group that knows the call, too
            for late in plain:
                one = torch.ones_like(plain[late]) / dist.get_world_size()
                x, w, bias = (plain | {late: all_reduce(one, "sum", dist.group.WORLD)}).values()
                told.append(any(isinstance(each, AsyncCollectiveTensor) for each in (x, w, bias)))
                told.append(torch.equal(operator(x, w, bias=bias), whole))
    return told


def test_results_of_functional_collectives_are_waited_for():
    assert run_ranks(waited_for, 2) == [[True] * 36] * 2


class Named(torch.Tensor):
    """A subclass that is a tensor, as parameters of many libraries are."""


def taken() -> list[bool]:
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    plain = ow.matmul_all_reduce(x, w)
    others = (w.as_subclass(Named), torch.nn.Parameter(w, requires_grad=False))
    return [torch.equal(plain, ow.matmul_all_reduce(x, other)) for other in others]


def test_subclasses_that_are_tensors_are_taken():
    assert run_ranks(taken, 2) == [[True] * 2] * 2
