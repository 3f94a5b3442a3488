"""Groups are found in every form a caller may name them, and wrong ones are refused by type."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from overweave.errors import GroupError, PeerError
from overweave.memory.group import _byte_device, all_gather_bytes, process_group_of, resolve
from tests.ranks import run_ranks


def refusal(group: object) -> str:
    with pytest.raises(GroupError) as caught:
        resolve(group)
    return str(caught.value)


def test_not_initialised():
    assert "not initialised" in refusal(None)


def name_the_world() -> list[list[object]]:
    mesh = dist.init_device_mesh("cpu", (2,))
    forms = (None, dist.group.WORLD, dist.group.WORLD.group_name, mesh)
    if hasattr(dist, "GroupName"):
        del dist.GroupName  # torch 2.10 has none
    return [[group.rank, group.world_size, group.timeout_s] for group in map(resolve, forms)]


@pytest.mark.slow
def test_every_form_of_a_group():
    told = run_ranks(name_the_world, 2, group_timeout_s=17.0)
    assert told == [[[rank, 2, 17.0]] * 4 for rank in range(2)]


def test_bytes_travel_by_the_groups_own_gpu(monkeypatch: pytest.MonkeyPatch):
    """A thread that nobody told which GPU is its process's has the first one as its current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpus, own = {torch.device("cuda")}, torch.device("cuda", 3)
    kinds = [SimpleNamespace(_device_types=gpus, bound_device_id=bound) for bound in (own, None)]
    kinds.append(SimpleNamespace(_device_types={torch.device("cpu"), *gpus}, bound_device_id=own))
    assert [str(_byte_device(kind)) for kind in kinds] == ["cuda:3", "cuda:0", "cpu"]  # type: ignore[arg-type]


def name_wrongly() -> list[str]:
    grid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    first = dist.new_group([0])
    outsider = [refusal(first)] if dist.get_rank() == 1 else []
    return [refusal("nobody"), refusal(grid), refusal(7.5), refusal(5), *outsider]


def test_wrong_groups_are_refused():
    for rank, told in enumerate(run_ranks(name_wrongly, 2)):
        unknown, grid, number, whole, *outsider = told
        assert "no group has this name" in unknown
        assert "2 dimensions" in grid
        assert "float" in number
        assert "int" in whole
        assert bool(outsider) == (rank == 1)
        assert all("rank 1 of the world is not in it" in text for text in outsider)


def name_one_that_moves_nothing() -> str:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return refusal(None)


def test_a_backend_that_moves_nothing_is_refused():
    assert "its backend fake has no time-out" in run_ranks(name_one_that_moves_nothing, 1)[0]


def name_meshes() -> list[str]:
    told = [refusal(DeviceMesh("cpu", [1, 0]))]
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    assert resolve(mesh).world_size == 1
    dist.destroy_process_group(mesh.get_group())
    return [*told, refusal(mesh)]


def test_meshes_in_another_order_than_their_groups_and_without_one_are_refused():
    for disordered, gone in run_ranks(name_meshes, 2):
        assert "its ranks are [1, 0]" in disordered
        assert "it was destroyed" in gone


def name_equal_meshes() -> list[object]:
    """Whether two meshes are equal, and their groups others; how often one is asked that is named three times."""
    first, second = (dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"] for _ in range(2))
    others = process_group_of(first) is not process_group_of(second)
    third = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["a"]
    with patch.object(DeviceMesh, "get_group", autospec=True, side_effect=DeviceMesh.get_group) as asked:
        groups = {process_group_of(third) for _ in range(3)}
    assert groups == {third.get_group()}
    return [first == second, others, asked.call_count]


def test_a_mesh_is_asked_once_and_an_equal_one_for_itself():
    assert run_ranks(name_equal_meshes, 2) == [[True, True, 1]] * 2


def gather() -> list[str]:
    group = resolve(None)
    with pytest.raises(GroupError):
        all_gather_bytes(group, b"four", 3)
    return [data.hex() for data in all_gather_bytes(group, bytes([group.rank] * group.rank), 5)]


def test_all_gather_bytes_keeps_length_and_order():
    assert run_ranks(gather, 3) == [["", "01", "0202"]] * 3


def gather_without_the_last() -> str:
    group = resolve(None)
    if group.rank == 2:
        return "left"
    with pytest.raises(PeerError) as caught:
        all_gather_bytes(group, b"", 1, deadline_s=5.0)
    return type(caught.value).__name__


def test_a_rank_that_left_is_noticed():
    assert run_ranks(gather_without_the_last, 3, timeout_s=20) == ["PeerDied", "PeerDied", "left"]
