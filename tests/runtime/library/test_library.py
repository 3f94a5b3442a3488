"""Library operations: uneven collectives on gloo move what the schedule says, sums are fp32 and in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from overweave.errors import ScheduleError
from overweave.ir.epilogue import Norm
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Put, Reduce, Region
from overweave.memory.group import resolve
from overweave.runtime.library import epilogue
from overweave.runtime.library.calls import library_call, merge_parts, padded_rows, shapes_of
from overweave.runtime.library.epilogue import finish_rows
from overweave.runtime.library.library import equal_parts, full_precision, run_operation
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

PROBLEM = Problem(operator="all_gather_matmul", m=8, n=8, k=8, world_size=2, dtype="float32")


def collective_of(operator: str, m: int, world_size: int, rank: int) -> Collective:
    problem = Problem(operator=operator, m=m, n=8, k=8, world_size=world_size, dtype="float32")
    operations = build(f"{operator}.sequential", problem, {}).schedule.of_rank(rank)
    return next(operation for operation in operations if isinstance(operation, Collective))


def collect(operator: str, m: int, dtype: torch.dtype, has_room: bool) -> bool:
    """Runs the collective of a plan on buffers whose elements name their row, and the rank that holds them."""
    group = resolve(None)
    collective = collective_of(operator, m, group.world_size, group.rank)
    rows = torch.arange(m).float().reshape(m, 1).expand(m, 8)
    tensors: dict[str, torch.Tensor] = {}
    for region in collective.writes:
        height = padded_rows(m, group.world_size) if has_room else m
        tensors.setdefault(region.buffer, torch.full((height, 8), torch.nan, dtype=dtype))
    for region in collective.reads:
        first = group.rank * -(-m // group.world_size) if operator == "all_gather_matmul" else 0
        values = (rows[first:] + (0 if operator == "all_gather_matmul" else group.rank)).to(dtype)
        roomy = torch.cat([values, values.new_empty(padded_rows(len(values), group.world_size) - len(values), 8)])
        tensors.setdefault(region.buffer, roomy if has_room else values)
    called = merge_parts(collective, shapes_of(tensors), dict.fromkeys(tensors, m)) if has_room else collective
    run_operation(called, lambda region: tensors[region.buffer][slice(*region.rows), slice(*region.cols)], group)
    (target,) = {region.buffer for region in collective.writes}
    if operator == "all_gather_matmul":
        return torch.equal(tensors[target][:m], rows.to(dtype))
    lo, hi = collective.sources[group.rank].rows
    total = rows[lo:hi] * group.world_size + sum(range(group.world_size))
    return torch.equal(tensors[target][: hi - lo], total.to(dtype))


def collect_all(operator: str) -> list[str]:
    world_size = resolve(None).world_size
    return [
        f"m={m} {dtype} {has_room}"
        for m in (1, world_size, world_size + 1, 2 * world_size + 1, 8 * world_size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for has_room in (False, True)
        if not collect(operator, m, dtype, has_room)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_even_and_uneven_shards(operator: str, world_size: int):
    assert run_ranks(collect_all, world_size, operator) == [[]] * world_size


def gather_short_shards(short: int) -> bool:
    """Rank `short` brings one row, all others two, each part to two rows of a buffer that is full already: what a short
    shard is padded with must not land on the row behind it."""
    group = resolve(None)
    ranks, mine = range(group.world_size), 1 if group.rank == short else 2
    source = Region("x", group.rank, (0, mine), (0, 4))
    parts = tuple(Region("kept", group.rank, (2 * one, 2 * one + (1 if one == short else 2)), (0, 4)) for one in ranks)
    gather = Collective(
        name="gather", rank=group.rank, queue="main", function="all_gather", label="gather", ranks=tuple(ranks),
        sources=(source,), destinations=parts,
    )  # fmt: skip
    for _ in range(3):
        tensors = {"x": torch.full((mine, 4), float(group.rank)), "kept": torch.full((2 * len(ranks), 4), -7.0)}
        called = merge_parts(gather, shapes_of(tensors), {name: len(tensor) for name, tensor in tensors.items()})
        run_operation(called, lambda region: tensors[region.buffer][slice(*region.rows), slice(*region.cols)], group)  # noqa: B023
        expected = torch.arange(len(ranks)).repeat_interleave(2).float()
        expected[2 * short + 1] = -7.0
        if not torch.equal(tensors["kept"], expected[:, None].expand(-1, 4)):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_padding_lands_on_rows_that_are_there(world_size: int):
    for short in range(world_size):
        assert run_ranks(gather_short_shards, world_size, short) == [True] * world_size


def region(name: str, rows: int = 2, cols: int = 2) -> Region:
    return Region(name, 0, (0, rows), (0, cols))


def run_alone(operation: Compute | Reduce | Put, **tensors: torch.Tensor) -> None:
    run_operation(operation, lambda part: tensors[part.buffer][slice(*part.rows), slice(*part.cols)], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_product_is_added_at_its_place_before_it_is_rounded(place: int):
    """2^24 swallows a 1 in fp32: only where the product stands between 2^24 and -2^24 is it lost."""
    large = torch.full((2, 2), 2.0**24).bfloat16()
    parts = {"p": large, "q": -large, "a": torch.ones(2, 2).bfloat16(), "b": torch.full((2, 2), 0.5).bfloat16()}
    out = torch.empty(2, 2).bfloat16()
    compute = Compute(
        name="m",
        rank=0,
        queue="main",
        a=(region("a"),),
        b=region("b"),
        out=(region("out"),),
        addends=(region("p"), region("q")),
        place=place,
    )
    run_alone(compute, **parts, out=out)
    assert out.eq(1 if place == 2 else 0).all()


def test_what_moves_between_ranks_is_no_library_operation():
    put = Put(name="p", rank=0, queue="main", sources=(region("a"),), destinations=(region("b"),))
    with pytest.raises(ScheduleError) as caught:
        run_alone(put)
    assert "copy engine" in str(caught.value)


# What torch may do behind a matmul of a dtype: TF32 for fp32, 16-bit sums for 16-bit operands.
SHORTCUTS = {
    torch.float32: "allow_tf32",
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


@pytest.fixture(params=SHORTCUTS)
def shortcut(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, str]]:
    """A dtype and the name of its setting, which is afterwards as it was."""
    name = SHORTCUTS[request.param]
    before = getattr(torch.backends.cuda.matmul, name)
    yield request.param, name
    setattr(torch.backends.cuda.matmul, name, before)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_callers_shortcuts_are_put_aside_and_put_back(shortcut: tuple[torch.dtype, str], wanted: bool):
    settings, (dtype, name) = torch.backends.cuda.matmul, shortcut
    setattr(settings, name, wanted)
    with full_precision(dtype):
        assert not getattr(settings, name)
    assert getattr(settings, name) == wanted


def test_they_are_put_back_after_an_error(shortcut: tuple[torch.dtype, str]):
    settings, (dtype, name) = torch.backends.cuda.matmul, shortcut
    setattr(settings, name, True)
    with pytest.raises(ZeroDivisionError), full_precision(dtype):
        _ = 1 / 0
    assert getattr(settings, name)


def products_under_autocast(dtype: torch.dtype) -> list[torch.Tensor]:
    """What each kind of library part makes of numbers that bf16 cannot hold."""
    x, w, sum_of = (
        torch.full((2, 4), 1 + 2**-10, dtype=dtype),
        torch.eye(4, dtype=dtype),
        torch.zeros(2, 4, dtype=dtype),
    )
    tensors = {"x": x, "w": w, "y": torch.zeros(2, 4, dtype=dtype), "more": sum_of, "gate": w}
    a, b, out, more = (Region(name, 0, (0, rows), (0, 4)) for name, rows in (("x", 2), ("w", 4), ("y", 2), ("more", 2)))
    summed = Compute(name="c", rank=0, queue="main", a=(a,), b=b, out=(out,), addends=(more,))
    made = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_operation(summed, lambda region: tensors[region.buffer], None)  # type: ignore[arg-type]
        made.append(tensors["y"].clone())
        made.append(epilogue._gate_product(summed, 0, lambda region: tensors[region.buffer], tensors))
        epilogue.scaled_matmul(x.float(), w.float(), (torch.ones(1, 1), torch.ones(1, 1)), tensors["y"])
        made.append(tensors["y"].clone())
        finish_rows(
            tensors["y"], slice(0, 2), Norm(eps=1e-5), {"z": sum_of, "norm_weight": torch.ones(1, 4, dtype=dtype)}
        )
        made.append(sum_of)
        assert torch.is_autocast_enabled("cpu"), "the caller's own operations are still cast"
        assert torch.mm(x, w).dtype == torch.bfloat16
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_cast_under_a_callers_autocast(dtype: torch.dtype):
    for product in products_under_autocast(dtype):
        assert product.dtype == dtype
        assert torch.equal(product, torch.full((2, 4), 1 + 2**-10, dtype=dtype))


def test_equal_parts_of_memory_are_one_behind_the_other():
    whole = torch.empty(8, 3)
    found = equal_parts([whole[2:4], whole[4:6]], 2)
    assert found is not None
    assert found.shape == (4, 3)
    assert found.data_ptr() == whole[2:].data_ptr()
    assert equal_parts([whole[:2], whole[2:4], whole[4:4]], 2) is None
    assert equal_parts([whole[:1], whole[2:4]], 2) is None
    assert equal_parts([whole[:2], whole[4:6]], 2) is None
    assert equal_parts([whole[:2, :2], whole[2:4, :2]], 2) is None


def gathered_beside_others(short: int) -> list[list[float]]:
    """What a buffer holds once rank 0's shard of two rows and another's of four were gathered around rows that are
    there: the short one stands first (short=0), or last."""
    group = resolve(None)
    whole, heights = torch.full((8, 1), -1.0), [2, 4] if short == 0 else [4, 2]
    source = torch.full((heights[group.rank], 1), float(group.rank))
    starts = (0, 4)
    parts = tuple(
        Region("whole", group.rank, (at, at + rows), (0, 1)) for at, rows in zip(starts, heights, strict=True)
    )
    gather = Collective(
        name="gather", rank=group.rank, queue="main", function="all_gather", label="gather", ranks=(0, 1),
        sources=(Region("x", group.rank, (0, heights[group.rank]), (0, 1)),), destinations=parts,
    )  # fmt: skip
    tensors = {"whole": whole, "x": source}
    shapes = shapes_of(tensors)
    library_call(merge_parts(gather, shapes, {"whole": 8}), PROBLEM, shapes, group)(tensors)
    return whole.flatten().tolist()


def test_padding_lies_over_no_rows():
    for short, wanted in enumerate(([0, 0, -1, -1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, -1, -1])):
        assert run_ranks(gathered_beside_others, 2, short) == [wanted] * 2


def summed_columns() -> tuple[list[list[float]], list[list[float]]]:
    """What is left where a sum's parts, and then a scattered one, are some columns of wider rows."""
    group = resolve(None)
    rank = group.rank
    tensors = {"part": torch.full((2, 3), float(rank + 1)), "out": torch.zeros(2, 3)}
    middle = Region("part", rank, (0, 2), (1, 2))
    base = {"rank": rank, "queue": "main", "label": "sum", "ranks": (0, 1)}
    shapes = shapes_of(tensors)
    total = Collective(name="sum", function="all_reduce", sources=(middle,), destinations=(middle,), **base)  # type: ignore[arg-type]
    library_call(total, PROBLEM, shapes, group)(tensors)
    halves, own = (
        tuple(Region("part", rank, (at, at + 1), (1, 2)) for at in range(2)),
        Region("out", rank, (0, 1), (1, 2)),
    )
    scattered = Collective(name="sum", function="reduce_scatter", sources=halves, destinations=(own,), **base)  # type: ignore[arg-type]
    library_call(scattered, PROBLEM, shapes, group)(tensors)
    return tensors["part"].tolist(), tensors["out"].tolist()


def test_parts_of_rows_are_summed_too():
    for rank, (part, out) in enumerate(run_ranks(summed_columns, 2)):
        assert part == [[rank + 1, 3, rank + 1]] * 2
        assert out == [[0, 6, 0], [0, 0, 0]]
