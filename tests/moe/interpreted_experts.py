"""The kernels of a grouped matmul and of a routing, interpreted, beside plain torch: integers, bit for bit.

Run by test_interpreted_experts.py in a process of its own, as tests/runtime/interpreted_kernels.py is.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact import interpreted_moe  # noqa: E402
from overweave import moe  # noqa: E402
from overweave.ir.shards import shard_rows  # noqa: E402
from overweave.ir.tile_order import TileRow  # noqa: E402
from overweave.kernels.experts import clear_rest_kernel, outer_kernel  # noqa: E402
from overweave.kernels.quantise import quantise_rows_kernel  # noqa: E402
from overweave.moe import Routing, route  # noqa: E402
from overweave.runtime.kernel_calls import routing as kernel_routing  # noqa: E402
from overweave.runtime.kernel_calls.experts import ArrivingRows  # noqa: E402
from overweave.runtime.kernel_calls.routing import GridBarrier, RoutingSizes, route_call, tables_of, words_of  # noqa: E402
from overweave.runtime.library import grouped as reference  # noqa: E402
from overweave.runtime.library.grouped import Grouped  # noqa: E402

CPU = torch.device("cpu")
PROGRAMS = 3
UNTOUCHED = 7.0


class Form(NamedTuple):
    """What a call is given. source: rows of x where they are gathered."""

    ends: tuple[int, ...]
    rows: int
    k: int = 40
    n: int = 72
    is_transposed: bool = False
    source: int = 0
    scatters: bool = False
    weighs: bool = False
    bias: bool = False
    gate: bool = False
    gating: tuple[float, ...] = ()
    dtype: torch.dtype = torch.bfloat16


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def call_of(form: Form) -> Grouped:
    experts, dtype, is_fp8 = len(form.ends), form.dtype, form.dtype.itemsize == 1

    def weight() -> torch.Tensor:
        if form.is_transposed:
            return integers(experts, form.n, form.k, dtype=dtype).transpose(1, 2)
        return integers(experts, form.k, form.n, dtype=dtype)

    own = form.source or form.rows
    of_products = (experts, *((2,) * form.gate), form.n)
    return Grouped(
        integers(own, form.k, dtype=dtype),
        weight(),
        torch.tensor(form.ends, dtype=torch.int32),
        integers(*of_products) if form.bias else None,
        weight() if form.gate else None,
        "",
        torch.randint(0, own, (form.rows,), dtype=torch.int32) if form.source else None,
        torch.randperm(form.rows).int() if form.scatters else None,
        integers(form.rows, dtype=torch.float32) if form.weighs else None,
        torch.randint(1, 4, (own,)).float() if is_fp8 else None,
        torch.randint(1, 4, of_products).float() if is_fp8 else None,
        torch.bfloat16 if is_fp8 else dtype,
        form.gating,
    )


def computed(call: Grouped) -> torch.Tensor:
    """What the kernels make of a call, in an output that held UNTOUCHED."""
    out = torch.full((call.pairs, call.w.shape[2]), UNTOUCHED, dtype=call.out_dtype)
    interpreted_moe.run(out, call)
    return out


FORMS = {
    "an empty expert": Form((5, 5, 40, 41), 41),
    "as weights of linear layers lie": Form((5, 5, 40, 41), 41, is_transposed=True),
    "rows behind the last group": Form((5, 20), 44, bias=True),
    "no rows of any": Form((0, 0, 0), 4),
    "one expert": Form((0, 37, 37), 37),
    "gathered, scattered and weighted": Form((3, 9, 40), 40, source=13, scatters=True, weighs=True, bias=True),
    "gated": Form((17, 40), 40, is_transposed=True, source=9, gate=True),
    "gated, with biases": Form((17, 40), 40, is_transposed=True, gate=True, bias=True, weighs=True),
    "gated within limits": Form((17, 40), 40, gate=True, bias=True, gating=(9.0, 1.0, 1.0)),
    "single precision": Form((17, 40), 40, dtype=torch.float32, scatters=True),
    "fp8": Form((17, 40), 40, k=64, n=64, is_transposed=True, source=50, dtype=torch.float8_e4m3fn),
    "fp8, gated": Form((17, 40), 40, k=64, n=64, is_transposed=True, gate=True, dtype=torch.float8_e4m3fn),
    "fp8, gated within limits": Form(
        (17, 40), 40, 64, 64, True, gate=True, bias=True, gating=(99.0, 1.0, 2.0), dtype=torch.float8_e4m3fn
    ),
    "more experts than are looked at together": Form(tuple(range(0, 600, 4)), 596, k=16, n=8),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_results_are_those_of_plain_torch(form: Form):
    torch.manual_seed(0)
    call = call_of(form)
    got = computed(call)
    want = reference.multiply(call)
    stored = call.into[: form.ends[-1]].long() if call.into is not None else torch.arange(form.ends[-1])
    assert torch.equal(got[stored], want[stored])
    rest = torch.ones(form.rows, dtype=torch.bool).index_fill(0, stored, False)
    assert (got[rest] == UNTOUCHED).all()


@pytest.mark.parametrize("ends", [(5, 3, 40), (5, 20, 41), (-1, 20, 40)], ids=str)
def test_ends_without_sense_make_all_rows_nan(ends: tuple[int, ...]):
    call = call_of(Form((5, 20, 40), 40, source=9, bias=True))._replace(offs=torch.tensor(ends, dtype=torch.int32))
    assert computed(call).isnan().all()


def test_indices_out_of_range_are_not_followed():
    call = call_of(Form((10, 40), 40, source=13, scatters=True))
    assert call.rows is not None
    assert call.into is not None
    call.rows[3], call.rows[4] = 1 << 30, -5
    lost = call.into[12].item()
    call.into[12] = 1 << 30
    got = computed(call)
    assert got[call.into[3:5].long()].isnan().all()
    assert (got[int(lost)] == UNTOUCHED).all()
    assert torch.equal(got.nan_to_num(9), reference.multiply(call).index_fill(0, torch.tensor([lost]), 7).nan_to_num(9))


def test_nan_weights_of_an_expert_are_its_own_rows_matter():
    call = call_of(Form((10, 30), 30, k=40))
    call.w[1] = float("nan")
    got = computed(call)
    assert torch.equal(got[:10], reference.multiply(call)[:10])
    assert got[10:].isnan().all()


def test_gradients_of_weights():
    x, g, ends = integers(50, 24), integers(50, 40), torch.tensor([0, 13, 13, 45], dtype=torch.int32)
    out = torch.full((4, 24, 40), UNTOUCHED, dtype=torch.bfloat16)
    outer_kernel[(4 * 2 * 2,)](x, g, ends, out, 4, 24, 40, 16, 16, 32, "ieee")
    assert torch.equal(out, reference.outer(x, g, ends))


def test_rows_behind_the_last_group_are_cleared():
    x = torch.ones(9, 40)
    clear_rest_kernel[(2,)](x, torch.tensor([2, 6], dtype=torch.int32), 2, 9, 40, 32)
    assert x.sum(1).tolist() == [40.0] * 6 + [0.0] * 3


@pytest.mark.parametrize(("ranks", "rank", "ahead"), [(2, 0, 3), (2, 1, 5), (3, 1, 4), (4, 2, 5), (4, 0, 0), (1, 0, 2)])
@pytest.mark.parametrize("skew", ["even", "few", "one"])
def test_tiles_wait_for_the_shards_that_they_read_and_stand_as_these_come(ranks: int, rank: int, ahead: int, skew: str):
    tokens, top, experts, n = 61, 2, 5, 40
    high = {"even": experts, "few": 3, "one": 1}[skew]
    ids = torch.randint(0, high, (tokens, top), generator=torch.Generator().manual_seed(rank), dtype=torch.int32)
    tables, rows = route(ids, experts, ranks), tokens * top
    call = call_of(Form((), rows, k=16, n=n))._replace(offs=tables.offsets[1:], rows=tables.tokens)
    call = call._replace(x=integers(tokens, 16), w=integers(experts, 16, n))
    out = torch.full((rows, n), UNTOUCHED, dtype=torch.bfloat16)
    table = interpreted_moe.run(out, call, ArrivingRows(rank, ranks, ahead, 5), tables.bounds)
    assert torch.equal(out, reference.multiply(call))
    places, computed = list[tuple[int, int]](), list[int]()
    for tile in map(TileRow._make, table.tolist()):
        read = tables.tokens[tile.row : tile.row_end].tolist()
        owners = [next(s for s in range(ranks) if token < shard_rows(tokens, ranks, s)[1]) for token in read]
        assert (tile.wait_lo, tile.wait_hi, tile.wait_count) == (min(owners), max(owners) + 1, 1)
        assert tile.operation == 5
        places.append((max((rank - owner) % ranks for owner in owners), tile.weight))
        computed += range(tile.row, tile.row_end) if tile.col == 0 else ()
    assert sorted(computed) == list(range(rows))
    early = [each for each in places if each[1] < ahead]
    assert early == sorted(early)
    assert places[: len(early)] == early


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_as_by_plain_torch(dtype: torch.dtype):
    x = (torch.randn(9, 88, dtype=torch.float32) * torch.logspace(-9, 4, 9)[:, None]).to(dtype)
    x[3], x[5, 80] = 0.0, torch.nan
    held = torch.full((9, 96), torch.nan, dtype=dtype)
    held[:, :88] = x
    values, scales = torch.empty(9, 88, dtype=torch.float8_e4m3fn), torch.empty(9)
    quantise_rows_kernel[(4,)](held, values, scales, 9, 88, 96, 448.0, 32)
    for got, want in zip((values, scales), moe.quantise_rows(x), strict=True):
        assert torch.equal(got.float().nan_to_num(7), want.float().nan_to_num(7))


ROUTINGS = {
    "uniform": (torch.randint(0, 7, (50, 3), dtype=torch.int32), 7),
    "slots without an expert, and wrong ids": (torch.randint(-3, 9, (50, 3), dtype=torch.int32), 7),
    "many experts": (torch.randint(0, 300, (70, 2), dtype=torch.int32), 300),
    "columns that lie together": (torch.randint(0, 3, (3, 70), dtype=torch.int32).t(), 3),
    "one expert": (torch.full((40, 4), 2, dtype=torch.int32), 3),
    "no token": (torch.zeros(0, 4, dtype=torch.int32), 3),
    "one pair": (torch.zeros(1, 1, dtype=torch.int32), 1),
    "several parts of each program": (torch.randint(0, 5, (100, 2), dtype=torch.int32), 5),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_tables_are_those_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    """Twice, with what the first launch left where programs meet."""
    monkeypatch.setattr(kernel_routing, "PART", 32 if name == "several parts of each program" else 64)
    monkeypatch.setattr(kernel_routing, "MOST_PROGRAMS", 4)
    ids, experts = ROUTINGS[name]
    is_wrong = (ids < -1) | (ids >= experts)
    want = route(ids.masked_fill(is_wrong, -1), experts, 3)
    sizes = RoutingSizes(ids.numel(), ids.shape[1], experts, 3)
    meeting = GridBarrier.on(CPU)
    for _ in range(2):
        words = torch.full((words_of(sizes),), -9, dtype=torch.int32)
        call = route_call(ids, words, sizes, meeting)
        call.kernel[(call.programs,)](*call.arguments)
        got = Routing(*tables_of(words, sizes))
        assert got.reason.item() == int(is_wrong.any())
        assert all(torch.equal(a, b) for a, b in zip(got[:-1], want[:-1], strict=True))
    assert meeting.state[:3].tolist() == [2 << 20, 0, 0]


def test_programs_that_do_not_meet_leave_tables_in_range_and_say_so(monkeypatch: pytest.MonkeyPatch):
    """The word that ends waits stands for the deadline, which an interpreted wait has not. Who comes last meets all."""
    monkeypatch.setattr(kernel_routing, "PART", 64)
    sizes, meeting, reasons = RoutingSizes(200, 2, 5, 4), GridBarrier.on(CPU), set[int]()
    ids, meeting.state[1] = torch.randint(0, 5, (100, 2), dtype=torch.int32), 1
    for _ in range(8):
        words = torch.full((words_of(sizes),), -9, dtype=torch.int32)
        call = route_call(ids, words, sizes, meeting)
        call.kernel[(call.programs,)](*call.arguments)
        got = Routing(*tables_of(words, sizes))
        reasons.add(int(got.reason))
        assert all(int(table.min()) >= 0 and int(table.max()) < 200 for table in (got.order, got.places, got.tokens))
        assert int(got.bounds.min()) >= 0
        assert int(got.bounds.max()) <= 200
    assert 2 in reasons
