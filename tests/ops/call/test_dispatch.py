"""From tensors to a plan, among ranks: groups of every form, and whatever is wrong is told to every rank at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import GroupError, OverweaveError
from overweave.ops.call.prepare import aligned
from tests.clock import slowness
from tests.ops.calls import data_of, is_right, run, small_call
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

AG, RS = "all_gather_matmul", "matmul_reduce_scatter"
AT_ONCE_S = 2.0  # groups here have 30 s
TOO_LATE = "library #"  # of the emulation's own agreement: an operator must notice first, as it does on a GPU


def raised(act: Callable[[], object]) -> list[str]:
    """The type and the words of the error, which must come long before any timeout."""
    start_s = time.monotonic()
    with pytest.raises(OverweaveError) as caught:
        act()
    assert time.monotonic() - start_s < AT_ONCE_S * slowness()
    return [type(caught.value).__name__, str(caught.value)]


def name_groups() -> list[bool]:
    world = dist.group.WORLD
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    forms = (None, world, world.group_name, mesh, mesh.get_group())
    return [is_right(small_call(operator, 37), turn, form) for operator in (AG, RS) for turn, form in enumerate(forms)]


def test_every_form_of_a_group():
    assert run_ranks(name_groups, 2) == [[True] * 10] * 2


def compute_in_parts() -> dict[str, Any]:
    """Sub-groups that overlap, in orders of their own, two of them at a time; outsiders are refused at once."""
    rank = dist.get_rank()
    parts = [dist.new_group(members) for members in ([1, 3], [0, 2], [0, 1, 2], [3])]
    told: dict[str, Any] = {"right": [], "refused": []}
    for turn in range(3):
        for index, part in enumerate(parts):
            call = small_call((AG, RS)[index % 2], 11 + index)
            if dist.get_rank(part) >= 0:
                told["right"].append(is_right(call, turn, part))
            else:
                told["refused"].append(raised(partial(is_right, call, 0, part)))
        told["right"].append(is_right(small_call(RS, 37), turn))
    told["lacks"] = f"rank {rank} of the world is not in it"
    return told


def test_groups_of_some_ranks():
    for told in run_ranks(compute_in_parts, 4):
        assert all(told["right"])
        assert told["refused"]
        assert all(kind == GroupError.__name__ and told["lacks"] in text for kind, text in told["refused"])


def change_everything() -> list[bool]:
    """Known and new calls, both operators and plans of every kind in turn, without anything between them."""
    plans = {AG: (None, "push", "pull", "sequential", "per_shard"), RS: (None, "scatter", "fused_ring", "sequential")}
    calls = [small_call(operator, m, plan=plan) for m in (37, 5) for operator in plans for plan in plans[operator]]
    return [is_right(calls[turn * 7 % len(calls)], turn) for turn in range(100)]


def test_calls_in_a_row():
    assert run_ranks(change_everything, 3) == [[True] * 100] * 3


Spoil = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]

# What a rank passes instead of x, w and no plan: refused wherever it is passed.
BAD: dict[str, Spoil] = {
    "columns": lambda x, w: {"x": torch.ones(x.shape[0], 3)},
    "dtype": lambda x, w: {"x": x.double(), "w": w.double()},
    "mixed": lambda x, w: {"w": w.half()},
    "device": lambda x, w: {"x": x.to("meta"), "w": w.to("meta")},
    "strided": lambda x, w: {"x": torch.ones(x.shape[1], x.shape[0]).t()},
    "vector": lambda x, w: {"x": x[0]},
    "none": lambda x, w: {"w": None},
    "sparse": lambda x, w: {"w": w.to_sparse()},
    "empty": lambda x, w: {"w": w[:, :0]},
    "unknown plan": lambda x, w: {"plan": "teleport"},
    "no plan": lambda x, w: {"plan": ""},
    "plan of another operator": lambda x, w: {"plan": "matmul_all_reduce.two_shot"},
    "unknown option": lambda x, w: {"plan": "sequential speed=9"},
    "no option": lambda x, w: {"plan": "per_shard ring"},
    "option twice": lambda x, w: {"plan": "per_shard order=ring order=ring"},
    "bad option": lambda x, w: {"plan": "per_shard order=square"},
    "plan of no kind": lambda x, w: {"plan": 7},
}
# Taken by itself, and refused only because the other ranks ask for something else.
DIFFERENT: dict[str, Spoil] = {
    "rows": lambda x, w: {"x": torch.ones(x.shape[0] + 1, x.shape[1])},
    "half": lambda x, w: {"x": x.half(), "w": w.half()},
    "layout": lambda x, w: {"w": w.t().contiguous().t()},
    "plan": lambda x, w: {"plan": "per_shard"},
    "gradient": lambda x, w: {"w": w.clone().requires_grad_()},
}


def pass_wrongly(operator: str, kinds: list[str], culprits: list[int]) -> list[list[str]]:
    """New calls that are wrong on some ranks; each is followed by one that is right everywhere."""
    function = {AG: ow.all_gather_matmul, RS: ow.matmul_reduce_scatter}[operator]
    told = []
    for turn, kind in enumerate(kinds):
        call = small_call(operator, 12 * (turn + 1), n=8, k=8)
        data = data_of(call, dist.get_rank(), dist.get_world_size())
        given: dict[str, Any] = {"x": data.x, "w": data.w, "plan": None}
        if dist.get_rank() in culprits:
            given |= (BAD | DIFFERENT)[kind](data.x, data.w)
        told.append(raised(partial(function, given["x"], given["w"], plan=given["plan"])))
        assert is_right(call, turn), kind
    return told


@pytest.mark.parametrize("operator", [AG, RS])
def test_a_wrong_call_on_one_rank_is_refused_on_every_rank(operator: str):
    kinds = [*BAD, *DIFFERENT]
    first, culprit, last = run_ranks(pass_wrongly, 3, operator, kinds, [1])
    for kind, own, *others in zip(kinds, culprit, first, last, strict=True):
        assert own[0] == ("InputError" if kind in BAD else "RankMismatch"), (kind, own)
        for error, text in others:
            assert error == "RankMismatch", (kind, text)
            did = "raised an error before its call: " if kind in BAD else "asks for "
            assert f"rank 1 {did}" in text, (kind, text)
            assert TOO_LATE not in text, (kind, text)


@pytest.mark.parametrize("operator", [AG, RS])
def test_a_call_that_is_wrong_on_every_rank(operator: str):
    for told in run_ranks(pass_wrongly, 2, operator, list(BAD), [0, 1]):
        assert [error for error, _ in told] == ["InputError"] * len(BAD)


def differ_where_some_know(is_late: bool) -> dict[str, Any]:
    """Rank 1 makes a call that is new, rank 0 one that was agreed before, and does not wait: it may get further."""
    rank, told = dist.get_rank(), dict[str, Any]()
    known, new = (
        small_call(AG, 12, dtype=torch.bfloat16),
        small_call(AG, 20, dtype=torch.bfloat16, plan="pull pieces=4 block_m=16 block_n=16"),
    )
    assert is_right(known)
    if is_late == (rank == 0):
        time.sleep(0.1)
    told["error"] = raised(lambda: [is_right(known if rank == 0 else new) for _ in range(3)])
    told["then"] = raised(partial(is_right, known, 1))
    told["once more"] = raised(ow.check)
    ow.reset()
    told["right"] = [is_right(known, 2), is_right(new, 3), is_right(small_call(RS, 12), 4)]
    return told


@pytest.mark.parametrize("is_late", [True, False])
def test_a_new_call_beside_a_known_one_is_refused_until_reset(is_late: bool):
    for told in run_ranks(differ_where_some_know, 2, is_late):
        assert told["error"][0] == "RankMismatch", told
        assert "m=12" in told["error"][1]
        assert "m=20" in told["error"][1]
        assert TOO_LATE not in told["error"][1]
        for error, text in (told["then"], told["once more"]):
            assert error in ("RankMismatch", "WorkspaceBroken")
            assert "eset" in text
        assert told["right"] == [True] * 3


def refuse_beside_known() -> dict[str, Any]:
    call = small_call(RS, 12)
    assert is_right(call)
    data = data_of(call, dist.get_rank(), 2)
    w = data.w if dist.get_rank() else data.w[:, :0]
    told: dict[str, Any] = {"error": raised(lambda: [run(call, data.x, w) for _ in range(3)])}
    ow.reset()
    told["right"] = is_right(call, 1)
    return told


def test_a_wrong_call_beside_a_known_one():
    culprit, peer = run_ranks(refuse_beside_known, 2)
    assert culprit["error"][0] == "InputError"
    assert peer["error"][0] == "RankMismatch"
    assert "rank 0 raised an error before its call: " in peer["error"][1]
    assert culprit["right"]
    assert peer["right"]


def allocate() -> list[Any]:
    told: list[Any] = [list(ow.symmetric_empty([3, 4], torch.float16).shape)]
    assert not ow.symmetric_empty((1 << 16,), torch.float32).any()
    told += [raised(partial(ow.symmetric_empty, shape, torch.float16)) for shape in ((2, -1), 5, (1.5,))]
    rank = dist.get_rank()
    told.append(raised(partial(ow.symmetric_empty, (3, -1 if rank else 4), torch.float16)))
    told.append(raised(partial(ow.symmetric_empty, (3, 4 + rank), torch.float16)))
    x = ow.symmetric_empty((4, 8), torch.float32).fill_(1)
    ow.check()
    return [*told, bool(ow.all_gather_matmul(x, torch.ones(8, 4)).eq(8).all())]


def test_symmetric_empty_is_agreed_on():
    for rank, (shape, *refused, one_alone, differ, is_right_now) in enumerate(run_ranks(allocate, 2)):
        assert shape == [3, 4]
        assert [error for error, _ in refused] == ["InputError"] * 3
        assert one_alone[0] == ("InputError" if rank else "RankMismatch")
        assert differ[0] == "RankMismatch"
        assert is_right_now


def test_a_tensor_off_its_alignment_is_copied_in_its_layout():
    flat = torch.arange(33.0)
    tensors = {"x": flat[:32].view(4, 8), "w": flat[1:].view(8, 4).t()}
    made = aligned(tensors)
    assert made["x"] is tensors["x"]
    assert made["w"] is not tensors["w"]
    assert torch.equal(made["w"], tensors["w"])
    assert made["w"].stride() == tensors["w"].stride()
    assert made["w"].data_ptr() % 16 == 0
