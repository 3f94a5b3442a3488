"""What layers refuse: a typed error on every rank, and no wait without an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import overweave as ow
from overweave import functional as woven
from overweave.errors import OverweaveError
from overweave.ops.call import prepare
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
TIMEOUT_S, MOST_S = 3.0, 5.0
K, N = 8, 16
FP8 = torch.float8_e4m3fn


def raised(act: Callable[[], Any]) -> tuple[str, str]:
    """The type and the words of what a call raises."""
    try:
        act()
    except OverweaveError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, K, requires_grad=True), torch.ones(N, K, requires_grad=True)


def with_dtensor(group: Any) -> Any:
    """A layer whose weight lies on another mesh than its group."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.ones(N, K), mesh, [Shard(0)])
    return lambda: woven.all_gather_linear(torch.ones(4, K), weight, group=group)


def twice_differentiated() -> None:
    """Of gathered rows that were kept without their history."""
    x, weight = operands()
    y = woven.all_gather_linear(x, weight, save="columns")
    torch.autograd.grad(y.sum(), x, create_graph=True)


def through_a_freed_graph() -> None:
    x, weight = operands()
    y = woven.linear_reduce_scatter(x, weight)
    y.backward(torch.ones_like(y))
    y.backward(torch.ones_like(y))


def scaled(**wanting: bool) -> Any:
    x, w = torch.ones(4, 16).to(FP8), torch.ones(16, 16).to(FP8)
    one = torch.ones(1, requires_grad=wanting.get("scale", False))
    x.requires_grad_(wanting.get("x", False))
    return ow.all_gather_matmul(x, w.t(), scale_x=one, scale_w=torch.ones(1))


def refusals() -> dict[str, tuple[str, str]]:
    """What every rank is told where all make the same mistake."""
    x, weight = (each.detach() for each in operands())
    other, _ = dist.new_subgroups(1)
    square = torch.ones(K, K)
    bad: dict[str, Callable[[], Any]] = {
        "a tensor in the place of the group": lambda: woven.all_gather_linear(x, weight, None, torch.ones(2)),
        "a group other than the mesh's": with_dtensor(other),
        "a weight that lies the other way round": lambda: woven.linear_all_reduce(x, weight.t()),
        "a vector as weight": lambda: woven.linear_all_reduce(x, weight[0]),
        "the last dimension": lambda: woven.all_gather_linear(x, weight, dim=-1),
        "a dimension too many": lambda: woven.linear_reduce_scatter(x, weight, dim=2),
        "a size that is not dealt": lambda: woven.all_gather_linear(x, weight, size=5),
        "mixed dtypes": lambda: woven.linear_all_reduce(x, weight.double()),
        "an unknown save": lambda: woven.all_gather_linear(*operands(), save="all"),
        "an unknown activation": lambda: woven.linear_all_reduce(x, square, activation="relu"),
        "one where gradients are kept": lambda: woven.linear_all_reduce(*operands(), activation="relu"),
        "fewer x than weights": lambda: woven.linear_reduce_scatter([x], [weight, weight]),
        "no products": lambda: woven.linear_all_reduce([], []),
        "no weights": lambda: woven.all_gather_linear(x, []),
        "no x": lambda: woven.linear_reduce_scatter([], weight),
        "what is no weight": lambda: woven.linear_all_reduce(x, None),  # type: ignore[arg-type]
        "products of two shapes": lambda: woven.linear_reduce_scatter([x, x], [weight, square]),
        "double backward": twice_differentiated,
        "a freed graph": through_a_freed_graph,
        "fp8 that is differentiated": lambda: scaled(x=True),
        "scales that are differentiated": lambda: scaled(scale=True),
        "no main_grad": lambda: woven.linear_all_reduce(*operands(), main_grad=True),
    }
    told = {name: raised(act) for name, act in bad.items()}
    ok = torch.equal(woven.linear_all_reduce(x, weight), torch.full((4, N), float(K * dist.get_world_size())))
    return told | {"then": ("ok" if ok else "wrong", "")}


def test_mistakes_of_all_ranks_are_typed_on_each():
    for told in run_ranks(refusals, 2):
        assert told.pop("then")[0] == "ok"
        kinds = {name: kind for name, (kind, _) in told.items()}
        assert {name for name, kind in kinds.items() if kind not in ("InputError", "GroupError")} == set(), kinds
        assert kinds["a tensor in the place of the group"] == kinds["a group other than the mesh's"] == "GroupError"
        assert "create_graph" in told["double backward"][1]
        assert "retain_graph" in told["a freed graph"][1]


def gradients_on_one_rank(layer: str) -> tuple[str, str]:
    x, weight = operands()
    weight.requires_grad_(dist.get_rank() == 0)
    return raised(lambda: getattr(woven, layer)(x.detach(), weight))


@pytest.mark.parametrize("layer", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"])
def test_gradients_on_one_rank_are_a_mismatch_on_all(layer: str):
    for kind, words in run_ranks(gradients_on_one_rank, 3, layer):
        assert kind == "RankMismatch"
        assert "with gradients of w.0" in words


def backward_on_some(layer: str, is_known: bool) -> tuple[str, str, float]:
    """Rank 0 does not differentiate. is_known: calls that ranks have made before."""
    x, weight = operands()
    y = getattr(woven, layer)(x, weight)
    if is_known:
        y.backward(torch.ones_like(y))
        y = getattr(woven, layer)(x, weight)
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT_S + 1.5)
        return "", "", 0.0
    started = time.monotonic()
    kind, words = raised(lambda: y.backward(torch.ones_like(y)))
    return kind, words, time.monotonic() - started


@pytest.mark.nightly
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("layer", ["all_gather_linear", "linear_reduce_scatter"])
def test_a_backward_on_some_ranks_ends_with_the_time_out(layer: str, is_known: bool):
    _, *waiting = run_ranks(backward_on_some, 3, layer, is_known, group_timeout_s=TIMEOUT_S)
    for kind, words, took_s in waiting:
        assert kind in ("PeerTimeout", "RankMismatch"), (kind, words)
        assert took_s < MOST_S
        assert "rank 0" in words


def a_backward_that_meets_a_forward() -> tuple[str, str]:
    """Rank 0 goes on to its next layer while the others differentiate."""
    x, weight = operands()
    y = woven.linear_reduce_scatter(x, weight)
    if dist.get_rank() == 0:
        return raised(lambda: woven.linear_all_reduce(x.detach(), weight.detach()))
    return raised(lambda: y.backward(torch.ones_like(y)))


def test_a_backward_that_meets_a_forward_is_a_mismatch_on_all():
    for kind, words in run_ranks(a_backward_that_meets_a_forward, 3):
        assert kind == "RankMismatch"
        assert "all_gather_matmul" in words
        assert "matmul_all_reduce" in words


def first_in_a_capture() -> tuple[str, str, bool]:
    """A call whose plan is bound while a stream is captured, which CUDA refuses."""
    x, weight = (each.detach() for each in operands())
    refused = RuntimeError("operation not permitted when stream is capturing")
    with patch.multiple(prepare, _bound=Mock(side_effect=refused), is_captured=lambda tensor: True):
        kind, words = raised(lambda: woven.linear_all_reduce(x, weight))
    ow.reset()
    whole = torch.full((4, N), float(K * dist.get_world_size()))
    return kind, words, torch.equal(woven.linear_all_reduce(x, weight), whole)


def test_a_first_call_inside_a_capture_is_refused():
    told = run_ranks(first_in_a_capture, 2)
    assert any(kind == "InputError" and "before the capture" in words for kind, words, _ in told)
    for kind, words, is_right in told:  # a rank that is behind is told by its peer
        assert kind in ("InputError", "PeerError")
        assert "is capturing" in words
        assert is_right


def late_results() -> list[bool]:
    """A result of torch's functional collectives that nobody has waited for, as x of each layer."""
    told = []
    for layer in (woven.all_gather_linear, woven.linear_reduce_scatter, woven.linear_all_reduce):
        x, weight = (each.detach() for each in operands())
        late = all_reduce(x / dist.get_world_size(), "sum", dist.group.WORLD)
        told.append(torch.equal(layer(late, weight), layer(x, weight)))
        with torch.no_grad():
            late = all_reduce(x / dist.get_world_size(), "sum", dist.group.WORLD)
            told.append(torch.equal(layer(late, weight), layer(x, weight)))
    return told


def test_results_under_way_are_waited_for():
    assert run_ranks(late_results, 2) == [[True] * 6] * 2


def unlike_shapes() -> list[str]:
    """Of operands that are flattened to matrices of the right size, and have another shape than the result's."""
    x, weight = torch.zeros(2, 3, K), torch.zeros(5, K)
    turned, norm = torch.zeros(3, 2, 5), ow.RmsNorm(torch.ones(5), torch.zeros(3, 2, 5))
    calls: list[Callable[[], Any]] = [
        lambda: woven.linear_all_reduce(x, weight, residual=turned),
        lambda: woven.linear_all_reduce(x, weight, norm=norm),
        lambda: woven.linear_reduce_scatter(torch.zeros(4, 3, K), weight, residual=turned),
        lambda: woven.all_gather_linear(x, weight, residual=torch.zeros(3, 4, 5)),
        lambda: woven.all_gather_linear(x, [weight, weight], dim=1, residual=torch.zeros(2, 6, 5)),
        lambda: woven.linear_all_reduce([x, torch.zeros(3, 2, 4)], [weight, torch.zeros(5, 4)]),
    ]
    return [raised(each)[1] for each in calls]


def test_a_residual_has_the_shape_of_the_result_and_all_inputs_have_one():
    for residual, norm, scattered, gathered, several, inputs in run_ranks(unlike_shapes, 2):
        assert "residual [2, 3, 5]: got [3, 2, 5]" in residual
        assert "residual [2, 3, 5]: got [3, 2, 5]" in norm
        assert "residual [2, 3, 5]: got [3, 2, 5]" in scattered
        assert "residual [4, 3, 5]: got [3, 4, 5]" in gathered
        assert "beside several weights" in several
        assert "got [3, 2, 4] beside [2, 3, 8]" in inputs
