"""Collectives inside calls: a rank that waits in one for a peer that makes another call hears of it at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from overweave.attention.heads import heads_of_all_rows, rows_of_all_heads
from overweave.errors import OverweaveError, PeerError, RankMismatch
from overweave.memory.board.board import Alarm, Board
from overweave.moe.dispatch import combine, dispatch
from overweave.ops.call.collective import run_collective
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.collectives import (
    Exchange,
    all_gather_rows,
    all_reduce_rows,
    exchange_in,
    reduce_scatter_rows,
)
from tests.clock import slowness
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS, ROWS, COLS = 2, 4, 8
NAMED_WITHIN_S = 2.0
GLOO_GIVES_UP_S = 2 * NAMED_WITHIN_S  # what waits in gloo then ends: only then can ranks leave the group


def heads(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    return rows_of_all_heads(exchange, heads_of_all_rows(exchange, x.view(1, 2, ROWS // 2, COLS), ROWS))


def routed(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    sent = dispatch(x, torch.arange(ROWS).view(ROWS, 1), None, ROWS, exchange.place.name)
    return combine(sent.x, sent)


MOVED: dict[str, Callable[[Exchange, torch.Tensor], torch.Tensor]] = {
    "gather": lambda exchange, x: all_gather_rows(exchange, x, RANKS * ROWS),
    "scatter": reduce_scatter_rows,
    "reduce": all_reduce_rows,
    "heads": heads,
    "dispatch": routed,
}


def raised(act: Callable[[], object]) -> tuple[str, str, float]:
    start_s = time.monotonic()
    with pytest.raises(OverweaveError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start_s


def odd_calls() -> dict[str, tuple[str, str, float]]:
    """What a rank hears of a peer that makes another call, both of which are known, later than itself."""
    found, x = {}, torch.ones(ROWS, COLS)
    for name, move in MOVED.items():
        group = dist.new_group(list(range(RANKS)))  # one whose calls differed runs no more collectives
        named, odd = exchange_in(group, name), exchange_in(group, "odd")
        move(named, x)
        all_reduce_rows(odd, x)
        if dist.get_rank() == 0:
            found[name] = raised(partial(move, named, x))
        else:
            time.sleep(0.1)  # rank 0 is in its collective
            found[name] = raised(partial(all_reduce_rows, odd, x))
    return found


def test_known_calls_of_one_island_that_differ_are_named_at_once():
    for found in run_ranks(odd_calls, RANKS, group_timeout_s=GLOO_GIVES_UP_S):
        assert found.keys() == MOVED.keys()
        for name, (kind, text, took_s) in found.items():
            assert kind == RankMismatch.__name__
            assert "odd: all_reduce" in text
            assert name in text
            assert took_s < NAMED_WITHIN_S * slowness()


def given_up() -> tuple[str, str, float]:
    group = group_of(None)
    board = Board.of(group)
    if group.rank == 1:
        time.sleep(0.1)
        board.alarm(Alarm("failed", "it has no memory", 1))
    return raised(board.check if group.rank else lambda: run_collective(group, dist.all_reduce, torch.ones(4)))


def test_a_peer_that_gives_up_is_not_waited_for():
    for kind, text, took_s in run_ranks(given_up, RANKS, group_timeout_s=GLOO_GIVES_UP_S):
        assert kind == PeerError.__name__
        assert "rank 1 failed: it has no memory" in text
        assert took_s < NAMED_WITHIN_S * slowness()
