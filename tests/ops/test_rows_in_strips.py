"""`matmul_reduce_scatter` with `rows=cyclic`: every bit of the rows that the map names, and who is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError
from overweave.ops.explain import explain
from tests.ranks import run_ranks

PLAN = "waves rows=cyclic sms=6 library_sms=2 block_m=16 block_n=16"


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The own ones, of whole numbers, and the whole sum."""
    generator, ranks = torch.Generator().manual_seed(m), range(dist.get_world_size())
    xs = [torch.randint(-3, 4, (m, k), generator=generator).float() for _ in ranks]
    ws = [torch.randint(-3, 4, (k, n), generator=generator).float() for _ in ranks]
    whole = torch.stack([x @ w for x, w in zip(xs, ws, strict=True)]).sum(0)
    return xs[dist.get_rank()], ws[dist.get_rank()], whole


def is_normed(factors: tuple[torch.Tensor, torch.Tensor], residual: torch.Tensor, sums: torch.Tensor) -> bool:
    """Whether a norm is of the rows that a sum of the same plan has."""
    norm = ow.RmsNorm(torch.arange(40.0), residual)
    normed, z, rows = ow.matmul_reduce_scatter(*factors, norm=norm, plan=PLAN)
    wanted = torch.nn.functional.rms_norm(z, (40,), norm.weight, norm.eps)
    return torch.equal(z, sums) and torch.allclose(normed, wanted, 1e-6, 1e-6) and len(rows.rows) == len(z)


def wrong_strips(*heights: int) -> list[str]:
    """Ragged columns, whole and lower last strips, calls in a row, and a residual."""
    wrong, ranks = [], dist.get_world_size()
    for height in heights:
        x, w, whole = operands(ranks * height, 40, 8)
        residual = torch.arange(whole.numel()).float().view_as(whole)
        y, rows = ow.matmul_reduce_scatter(x, w, plan=PLAN)
        again, _ = ow.matmul_reduce_scatter(x, w, residual=residual[rows.rows], plan=f"{PLAN} groups=auto")
        parts = [torch.empty_like(y) for _ in range(ranks)]
        dist.all_gather(parts, y)
        found = {
            "rows": torch.equal(y, whole[rows.rows]),
            "residual": torch.equal(again, (whole + residual)[rows.rows]),
            "norm": ranks == 1 or is_normed((x, w), residual[rows.rows], again),
            "whole": torch.equal(rows.restore(torch.cat(parts)), whole),
            "order": torch.equal(rows.rows_of_all.sort().values, torch.arange(len(whole))),
            "strips": ranks == 1
            or height <= 16
            or rows.rows[16] == 16 * ranks + dist.get_rank() * min(16, height - 16),
        }
        wrong += [f"{height} {name}" for name, is_right in found.items() if not is_right]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_rows_in_strips_have_every_bit(world_size: int):
    assert run_ranks(wrong_strips, world_size, 64, 37, 5) == [[]] * world_size


def refusals() -> list[str]:
    x, w, whole = operands(32, 16, 8)
    y, rows = ow.matmul_reduce_scatter(x, w, plan=PLAN)
    weight = w.clone().requires_grad_()
    tries = (
        lambda: ow.matmul_reduce_scatter(x, weight, plan=PLAN),
        lambda: ow.matmul_reduce_scatter([x, x], [w, w], plan=PLAN),
        lambda: ow.matmul_reduce_scatter(x[:31], w, plan=PLAN),
        lambda: ow.matmul_all_reduce(x, w, plan=PLAN),
        lambda: rows.restore(whole[:5]),
    )
    said = []
    for attempt in tries:
        with pytest.raises(InputError) as refused:
            attempt()
        said.append(str(refused.value))
    after, _ = ow.matmul_reduce_scatter(x, w, plan=PLAN)
    return [*said, str(torch.equal(after, y))]


@pytest.mark.slow
def test_what_has_no_place_for_a_map_is_refused_on_every_rank():
    for gradients, lists, ragged, other, shape, after in run_ranks(refusals, 2):
        assert "has neither" in gradients
        assert "has neither" in lists
        assert "deals as many rows to each of 2 ranks, and there are 31" in ragged
        assert "rows" in other
        assert "Pass the 32 rows of all ranks" in shape
        assert after == "True"


def test_nothing_chooses_strips_by_itself():
    text = str(explain("matmul_reduce_scatter", m=8192, n=4096, k=4096, world_size=4))
    assert "cyclic" not in text
