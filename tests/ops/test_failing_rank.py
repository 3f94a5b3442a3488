"""A rank that fails between announcing a call and launching it: its peers hear of it at once, not at their deadline."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import overweave as ow
from overweave.errors import PeerError
from overweave.ops.call import prepare, prepared
from tests.ranks import run_ranks

DEADLINE_S = 30.0


def exhausted(*given: object) -> Any:
    raise MemoryError("no room for the result")


def call(plan: str, value: int = 1) -> torch.Tensor:
    y = ow.matmul_reduce_scatter(torch.full((8, 16), float(value)), torch.ones(16, 24), plan=plan)
    assert isinstance(y, torch.Tensor)
    return y


def fails_once(plan: str, where: str) -> dict[str, Any]:
    """What this rank raised when rank 1 had no memory, how late, and whether calls are right once it is reset."""
    rank = torch.distributed.get_rank()
    calls = 1 if where == "bind" else 2
    for _ in range(calls - 1):
        call(plan)
    torch.distributed.barrier()  # an alarm ends whatever call a peer is still in
    if rank == 1 and where == "bind":
        original, prepare._bind = prepare._bind, exhausted  # type: ignore[assignment]
    elif rank == 1:
        (known,) = next(iter(prepared.CALLS.values())).items()
        prepared.CALLS[next(iter(prepared.CALLS))][known[0]] = replace(known[1], make=exhausted)
    start_s = time.monotonic()
    try:
        call(plan)
        raised: BaseException | None = None
    except (PeerError, MemoryError) as error:
        raised = error
    took_s = time.monotonic() - start_s
    if rank == 1 and where == "bind":
        prepare._bind = original
    elif rank == 1:
        prepared.CALLS[next(iter(prepared.CALLS))][known[0]] = known[1]
    ow.reset()
    is_right = all(bool((call(plan, value) == 16 * 2 * value).all()) for value in (2, 3))
    return {"raised": type(raised).__name__, "message": str(raised), "took_s": took_s, "is_right": is_right}


@pytest.mark.parametrize("where", ["bind", "outputs"])
@pytest.mark.parametrize("plan", ["scatter", "sequential"])
def test_peers_hear_of_a_rank_without_memory(plan: str, where: str):
    peer, failing = run_ranks(fails_once, 2, plan, where, timeout_s=2 * DEADLINE_S, group_timeout_s=DEADLINE_S)
    assert failing["raised"] == "MemoryError"
    assert peer["raised"] == "PeerError"
    assert "rank 1 failed" in peer["message"]
    assert "no room for the result" in peer["message"]
    assert peer["took_s"] < DEADLINE_S  # its own deadline would be a PeerTimeout
    assert peer["is_right"]
    assert failing["is_right"]
