"""The board: agreement, deaths, lateness, alarms and reset, each between real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overweave.errors import OverweaveError, PeerDied, PeerTimeout, RankMismatch
from overweave.memory.board import board
from overweave.memory.board.board import Alarm, Board
from overweave.memory.group import resolve
from overweave.runtime.host.processes import RankProcesses
from tests.clock import slowness
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

DIED_WITHIN_S = 2.0


def raised(act: Callable[[], object]) -> tuple[str, str, float]:
    start_s = time.monotonic()
    with pytest.raises(OverweaveError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start_s


def agree_often() -> int:
    board = Board.of(resolve(None))
    for call in range(200):
        assert board.agree(b"the same") == 2 * call + 1
        assert board.post(b"another") == 2 * call + 2
    assert Board.of(resolve(None)) is board
    board.finish()  # a peer may still be at its last call when this process ends
    return board.call


def test_ranks_that_agree_go_on():
    assert run_ranks(agree_often, 3) == [400] * 3


def disagree() -> list[object]:
    board = Board.of(resolve(None))
    verdict = raised(lambda: board.agree(b"m=7" if board.rank == 1 else b"m=8"))
    board.agree(b"peace")  # nothing was launched, so the next call is fine
    return list(verdict)


def test_a_mismatch_is_raised_on_every_rank_and_names_the_odd_one():
    for kind, text, took_s in run_ranks(disagree, 3):
        assert kind == RankMismatch.__name__
        assert "rank 1 asks for m=7, rank 0 asks for m=8" in text
        assert took_s < 1.0 * slowness()


def disagree_without_waiting() -> str:
    board = Board.of(resolve(None))
    try:
        board.post(b"a" if board.rank else b"b")
        while True:
            board.check_periodically()
    except RankMismatch as error:
        return str(error)


def test_a_mismatch_of_posted_calls_reaches_every_rank():
    for text in run_ranks(disagree_without_waiting, 2, timeout_s=10):
        assert "rank 1 asks for a, rank 0 asks for b" in text


def wait_for_ever(began: str) -> list[object]:
    board = Board.of(resolve(None))
    board.agree(b"start")
    Path(began, str(board.rank)).touch()
    if board.rank == 1:
        is_child = os.fork() == 0  # a child does not inherit the lock, so it does not keep its parent alive
        time.sleep(3 if is_child else 30)
        os._exit(0)

    def loop() -> None:
        while True:
            board.check_periodically()
            time.sleep(0.001)

    kind, text, _ = raised(loop)
    return [kind, text, time.monotonic()]


def test_a_dead_peer_is_found_while_nobody_has_reaped_it(tmp_path: Path):
    with RankProcesses(wait_for_ever, 3, str(tmp_path), group_timeout_s=30.0) as ranks:
        end_s = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < end_s:
            time.sleep(0.01)
        struck_s = time.monotonic()
        os.kill(ranks.processes[1], 9)  # a zombie from here on: its parent waits only when leaving
        for outcome in ranks.wait(10, 0, 2):
            kind, text, raised_s = outcome.value
            assert kind == PeerDied.__name__, outcome
            assert "rank 1 died" in text
            assert raised_s - struck_s < DIED_WITHIN_S * slowness()


def die_between_calls() -> list[object]:
    board = Board.of(resolve(None))
    board.probes_rarely = True
    board.agree(b"start")
    if board.rank == 1:
        board.post(b"call")
        os._exit(0)

    def call_for_ever() -> None:
        while True:
            board.post(b"call")

    kind, text, took_s = raised(call_for_ever)
    return [kind, "rank 1 died" in text, took_s]


def test_calls_that_probe_rarely_find_a_dead_peer_in_time():
    with RankProcesses(die_between_calls, 2, group_timeout_s=30.0) as ranks:
        (outcome,) = ranks.wait(20, 0)
    survivor = outcome.value
    assert survivor[:2] == [PeerDied.__name__, True]
    assert survivor[2] < DIED_WITHIN_S * slowness()


def alarm_between_calls() -> str:
    board = Board.of(resolve(None))
    board.probes_rarely = True
    board.agree(b"start")
    board.check_periodically()  # so that no probe is due
    board.all_gather_bytes(b"both are here")
    if board.rank == 1:
        time.sleep(0.1)
        return str(board.alarm(Alarm("timeout", "tile 7", 0, 5, 4)))
    while True:
        try:
            board.post(b"call")
        except OverweaveError as error:
            return str(error)


def test_calls_that_probe_rarely_heed_alarms():
    first, second = run_ranks(alarm_between_calls, 2, timeout_s=20)
    assert first == second


def leave_when_done() -> str:
    board = Board.of(resolve(None))
    board.agree(b"last")
    board.finish()
    if board.rank == 1:
        return "left"
    time.sleep(0.3)
    board.check()  # rank 1 owes nothing to this call
    kind, text, _ = raised(lambda: board.agree(b"one more"))
    return f"{kind} {'rank 1' in text}"


def test_a_peer_may_leave_after_its_part():
    assert run_ranks(leave_when_done, 2) == ["PeerDied True", "left"]


def come_late() -> list[object]:
    board = Board.of(resolve(None))
    if board.rank == 0:
        time.sleep(1.5)
    kind, text, took_s = raised(lambda: board.agree(b"call", deadline_s=0.4 if board.rank else 5.0))
    # Alarms last until all ranks have reset, and a reset may be repeated.
    kinds = [raised(board.check)[0]]
    if board.rank == 1:
        kinds.append(raised(lambda: board.reset(lambda: None, deadline_s=0.1))[0])
    board.reset(lambda: None)
    board.agree(b"again")
    return [kind, text, took_s, kinds]


@pytest.mark.slow
def test_a_late_rank_is_named_by_all_and_reset_mends_it():
    late, *others = run_ranks(come_late, 3, timeout_s=20)
    for kind, text, took_s, _ in others:
        assert kind == PeerTimeout.__name__
        assert "rank 0 is late" in text
        assert took_s < 0.4 + 1.0 * slowness()
    assert late[0] == PeerTimeout.__name__
    assert others[0][3] == ["PeerTimeout", "PeerTimeout"]


def sound_alarm() -> str:
    board = Board.of(resolve(None))
    board.agree(b"x" * 300)
    board.all_gather_bytes(b"both are here")
    if board.rank == 1:
        time.sleep(0.1)
        return str(board.alarm(Alarm("timeout", "tile 7 waits for arrived[3]", 0, 5, 4)))
    while True:
        try:
            board.check()
        except PeerTimeout as error:
            return str(error)


def test_an_alarm_reads_the_same_everywhere():
    told = run_ranks(sound_alarm, 2)
    assert told[0] == told[1]
    for part in ("call 1", "seen by rank 1", "rank 0 is late", "tile 7", "expected 5, seen 4"):
        assert part in told[0]


def exchange() -> list[list[str]]:
    board = Board.of(resolve(None))
    return [[data.decode() for data in board.all_gather_bytes(f"{turn}.{board.rank}".encode())] for turn in range(50)]


def test_exchange_never_mixes_turns():
    assert run_ranks(exchange, 3) == [[[f"{turn}.{rank}" for rank in range(3)] for turn in range(50)]] * 3


def test_later_calls_say_since_which_one_the_group_is_broken():
    first = Alarm("mismatch", "rank 1 asks for m=16, rank 0 asks for m=8", 1)
    assert str(first.error("0", 0, 2, 2)).startswith(
        "call 2 of group 0, seen by rank 0: rank 1 differs: rank 1 asks for m=16"
    )
    later = first.error("0", 0, 2, 5)
    assert isinstance(later, RankMismatch)
    assert str(later).startswith("make call 5 of group 0: the group is broken since call 2")
    assert "overweave.reset(group) on every rank" in str(later)


def test_ranks_that_call_other_operators_are_told_these():
    told = board._contrast(
        "a plan of matmul_all_reduce chosen by what was measured, 0 problems", "m=16 by all_gather_matmul.push"
    )
    assert told == ("asks for matmul_all_reduce", "asks for all_gather_matmul")
    assert (
        board._contrast("m=16 by all_gather_matmul.push", "m=8 by all_gather_matmul.push")[1]
        == "asks for m=8 by all_gather_matmul.push"
    )
