"""The board of ranks on several islands: agreement, disagreement, losses and reset, without any memory in common."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from overweave.errors import GroupError, MachineError, OverweaveError, PeerDied, PeerTimeout, RankMismatch
from overweave.memory.board import between_islands, islands, records
from overweave.memory.board.between_islands import BEAT_EVERY_S, LOST_AFTER_S
from overweave.memory.board.board import Alarm, Board
from overweave.memory.board.islands import Islands, ranks_text
from overweave.memory.board.lifelines import Lifelines, own_address
from overweave.memory.board.records import ISLAND, OutOfReach, SharedFile
from overweave.memory.group import resolve
from overweave.memory.host.workspace import HostHeap
from overweave.runtime.host.processes import RankProcesses
from tests.clock import slowness
from tests.islands import on_islands
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

NAMED_WITHIN_S = 5.0


def own_board() -> Board:
    return Board.of(resolve(None))


def raised(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(OverweaveError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value)


def for_ever(board: Board) -> None:
    while True:
        board.check_periodically()
        time.sleep(1e-3)


@pytest.mark.parametrize(
    ("names", "members"), [("aabb", [[0, 1], [2, 3]]), ("aaab", [[0, 1, 2], [3]]), ("abab", [[0, 2], [1, 3]])]
)
def test_ranks_of_one_name_are_an_island(names: str, members: list[list[int]]):
    def found() -> list[Any]:
        own = own_board().islands
        return [[list(each) for each in own.members], list(own.hosts)]

    assert run_ranks(on_islands, 4, names, found) == [[members, [*names]]] * 4


def test_islands_are_said_in_words():
    assert ranks_text((0, 1, 2, 5)) == "ranks 0-2, 5"
    assert str(Islands(((0, 3), (1,), (2,)), ("a", "b", "c", "a"))) == "ranks 0, 3 on a, rank 1 on b and rank 2 on c"


def test_no_memory_is_mapped_between_islands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ISLAND, "here")
    file = SharedFile.create(4096)
    address = file.address
    assert SharedFile.open(address).size_bytes == 4096
    monkeypatch.setenv(ISLAND, "there")
    with pytest.raises(OutOfReach, match="is not 'there'"):
        SharedFile.open(address)


def seen_in_a_heap() -> list[object]:
    """Which ranks' parts are mapped, and what their words say, once each rank has written its number into its own."""
    board = own_board()
    heap = HostHeap(board, 100)
    heap.words(0, 1)[0] = board.rank + 1
    board.all_gather_bytes(b"written")
    return [[*heap.starts], [heap.words(0, 1, rank)[0] for rank in heap.starts], len({*heap.addresses})]


def test_a_heap_is_of_the_ranks_of_an_island():
    found = run_ranks(on_islands, 4, "abca", seen_in_a_heap)
    assert found == [[[0, 3], [1, 4], 2], [[1], [2], 1], [[2], [3], 1], [[0, 3], [1, 4], 2]]


def out_of_reach() -> list[list[int]]:
    """Rank 1 cannot open the files of ranks 0 and 2, as if it were in another container of their host."""
    rank = dist.get_rank()
    with patch.object(SharedFile, "open", side_effect=OutOfReach("no such process")) if rank == 1 else patch.dict({}):
        return [list(each) for each in own_board().islands.members]


def test_a_rank_that_maps_no_peer_is_an_island_of_its_own():
    assert run_ranks(out_of_reach, 3) == [[[0, 2], [1]]] * 3


def without_memory() -> tuple[str, str]:
    fails = patch.object(SharedFile, "open", side_effect=OSError("too many open files"))
    with fails if dist.get_rank() == 1 else patch.dict({}):
        return raised(own_board)


def test_a_rank_that_has_no_memory_left_is_no_island():
    for kind, text in run_ranks(without_memory, 3):
        assert kind == MachineError.__name__
        assert "rank 1: too many open files" in text


def test_ranks_with_other_versions_are_named():
    def other() -> tuple[str, str]:
        newer = patch.object(islands, "installed", lambda name: "9.9")
        with newer if dist.get_rank() == 2 else patch.dict({}):
            return raised(own_board)

    for kind, text in run_ranks(on_islands, 3, "aab", other):
        assert kind == GroupError.__name__
        assert "rank 2 on b has overweave 9.9, triton 9.9" in text


def agree_often() -> list[object]:
    board = own_board()
    for call in range(50):
        assert board.agree(b"the same") == 2 * call + 1
        told = board.all_gather_bytes(f"{board.rank} {call}".encode())
        assert told == [f"{rank} {call}".encode() for rank in range(board.world_size)]
        assert board.post(b"another") == 2 * call + 2
    board.finish()
    return [board.call]


@pytest.mark.parametrize("names", ["ab", "aabb", "abc"])
def test_ranks_that_agree_go_on(names: str):
    assert run_ranks(on_islands, len(names), names, agree_often) == [[100]] * len(names)


def disagree() -> list[str]:
    board = own_board()
    kind, text = raised(lambda: board.agree(b"m=7" if board.rank == 2 else b"m=8"))
    board.agree(b"peace")  # nothing was launched, so the next call is fine
    return [kind, text]


def test_a_mismatch_is_raised_on_every_rank_and_names_the_odd_one_and_its_host():
    for kind, text in run_ranks(on_islands, 3, "aab", disagree):
        assert kind == RankMismatch.__name__
        assert "rank 2 on b asks for m=7, rank 0 on a asks for m=8" in text


def disagree_without_waiting(more: int) -> list[object]:
    """What is raised, and when, of a call that one rank makes otherwise, with `more` behind it that all make alike."""
    board = own_board()
    board.agree(b"start")
    dist.barrier()
    start_s = time.monotonic()

    def post_and_wait() -> None:
        board.post(b"m=7" if board.rank == 2 else b"m=8")  # which raises where peers were quicker
        for _ in range(more):
            board.post(b"m=9")
        for_ever(board)

    kind, text = raised(post_and_wait)
    took_s = time.monotonic() - start_s
    board.reset(lambda: None)
    board.agree(b"peace")
    board.post(b"peace")
    board.all_gather_bytes(b"nothing of it is left")
    board.finish()  # a peer may still look when this process ends
    time.sleep(2 * BEAT_EVERY_S)
    board.check()
    return [kind, text, took_s]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (0, r"rank 2 on b asks for m=7, rank . on a asks for m=8"),  # of rank 0 or 1, whose record came first
        (200, r"rank . on . made another call than rank . on . before call"),
    ],
)
def test_calls_that_were_only_announced_are_compared_and_reset(more: int, words: str):
    for kind, text, took_s in run_ranks(on_islands, 3, "aab", disagree_without_waiting, more):
        assert kind == RankMismatch.__name__
        assert re.search(words, str(text))
        assert took_s < NAMED_WITHIN_S * slowness()


def come_late() -> tuple[str, str]:
    board = own_board()
    if board.rank == 2:
        time.sleep(2.5)
        return raised(lambda: board.agree(b"late"))
    return raised(lambda: board.agree(b"in time", 1.0))


def test_a_rank_that_does_not_come_in_time_is_named():
    for kind, text in run_ranks(on_islands, 3, "aab", come_late):
        assert kind == PeerTimeout.__name__
        assert "rank 2 on b is late" in text


def sound_the_alarm(names: str) -> tuple[str, str]:
    os.environ[ISLAND] = names[dist.get_rank()]
    board = own_board()
    board.agree(b"start")
    dist.barrier()  # an alarm ends whatever a peer still waits for
    if board.rank == 0:
        board.alarm(Alarm("failed", "it has no memory", 0))
        os._exit(0)
    return raised(lambda: for_ever(board))


@pytest.mark.parametrize("names", ["ab", "aab"])
def test_an_alarm_reaches_other_islands_though_its_rank_ends_at_once(names: str):
    with RankProcesses(sound_the_alarm, len(names), names, group_timeout_s=30.0) as ranks:
        for outcome in ranks.wait(30, *range(1, len(names))):
            kind, text = outcome.value
            assert kind == "PeerError"
            assert "rank 0 on a failed: it has no memory" in text


def wait_for_ever(names: str, began: str, lost_after_s: float) -> list[object]:
    os.environ[ISLAND] = names[dist.get_rank()]
    with patch.object(between_islands, "LOST_AFTER_S", lost_after_s):
        board = own_board()
        board.agree(b"start")
        Path(began, str(board.rank)).touch()
        kind, text = raised(lambda: for_ever(board))
    return [kind, text, time.monotonic()]


@pytest.mark.parametrize(
    ("names", "killed", "lost_after_s"),
    [("aabb", (3,), LOST_AFTER_S), ("aabb", (2, 3), LOST_AFTER_S), ("ab", (1,), 1.0), ("ab", (0,), 1.0)],
)
def test_a_rank_or_a_host_that_dies_is_named_in_time(
    names: str, killed: tuple[int, ...], lost_after_s: float, tmp_path: Path
):
    survivors = [rank for rank in range(len(names)) if rank not in killed]
    with RankProcesses(wait_for_ever, len(names), names, str(tmp_path), lost_after_s, group_timeout_s=60.0) as ranks:
        end_s = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < len(names) and time.monotonic() < end_s:
            time.sleep(0.01)
        struck_s = time.monotonic()
        ranks.kill(*killed)
        for outcome in ranks.wait(30, *survivors):
            kind, text, raised_s = outcome.value
            assert kind == PeerDied.__name__
            assert any(f"rank {rank} on {names[rank]} died" in text for rank in killed), text
            assert raised_s - struck_s < NAMED_WITHIN_S * slowness()


def stand_still() -> bool:
    """Rank 0 does nothing for longer than a lost island is waited for. Its process exists, so it is not lost."""
    with patch.object(between_islands, "LOST_AFTER_S", 2 * BEAT_EVERY_S):
        board = own_board()
        courier = board._courier
        assert courier is not None
        assert courier._lines.is_open(1 - board.rank)
        board.agree(b"start")
        if board.rank == 0:
            with courier._lock:  # its courier stands still, too
                time.sleep(5 * BEAT_EVERY_S)
            board.check()
        board.agree(b"both go on")
        board.finish()
    return True


def test_a_rank_that_stands_still_is_not_lost():
    assert run_ranks(on_islands, 2, "ab", stand_still) == [True] * 2


def last_words() -> bool:
    """Rank 0 makes a call and is gone before rank 1, which has heard nothing of it for long, reads of that call."""
    board, goes_on = own_board(), threading.Event()
    courier = board._courier
    assert courier is not None
    if board.rank == 0:
        dist.barrier()
        board.post(b"the last call")
        courier.close()
        return True
    receive = courier._receive
    with (
        patch.object(between_islands, "LOST_AFTER_S", 0.0),
        patch.object(courier, "_receive", lambda: goes_on.wait(10) and receive()),
    ):
        time.sleep(2 * BEAT_EVERY_S)  # it stands in `_receive`
        dist.barrier()
        while courier._lines.is_open(0):
            time.sleep(1e-3)
        is_lost = not courier.has_process(0)
        goes_on.set()
        while courier.has_process(0):
            time.sleep(1e-3)
    return not is_lost and board._records.word(0, records.BEGUN) == 1


def test_a_rank_is_not_gone_before_its_last_call_is_known():
    assert run_ranks(on_islands, 2, "ab", last_words) == [True] * 2


@pytest.mark.parametrize("is_beating", [False, True])
def test_a_standstill_of_this_process_is_none_of_its_peers(is_beating: bool):
    heard, now_s = between_islands._Heard(), 0.0
    with patch("time.monotonic", lambda: now_s):
        now_s += 100.0  # nobody looked meanwhile
        heard.look()
        assert heard.silent_s < LOST_AFTER_S
        for _ in range(ceil(LOST_AFTER_S / BEAT_EVERY_S) + 2):
            now_s, heard.beat = now_s + BEAT_EVERY_S, heard.beat + is_beating
            heard.look()
    assert (heard.silent_s > LOST_AFTER_S) is not is_beating


def messages_of_calls() -> list[int]:
    """How many messages a rank sends in a second of calls that were agreed on, and in a second without any."""
    board, sent = own_board(), list[str]()
    courier = board._courier
    assert courier is not None
    store = courier._store

    class Counted:
        def set(self, key: str, value: bytes) -> None:
            sent.append(key)
            store.set(key, value)

        multi_get = store.multi_get

    courier._store = Counted()  # type: ignore[assignment]
    board.agree(b"start")
    counts, calls = [], []
    for is_calling in (True, False):
        sent.clear()
        end_s, before = time.monotonic() + 1.0, board.call
        while time.monotonic() < end_s:
            if is_calling:
                board.post(b"call")
            else:
                time.sleep(0.01)
        counts.append(len(sent))
        calls.append(board.call - before)
    board.finish()
    return [*counts, *calls]


def test_calls_add_no_message_between_hosts():
    for calling, idle, calls, _ in run_ranks(on_islands, 2, "ab", messages_of_calls):
        assert calls > 200
        assert idle <= 1 / BEAT_EVERY_S + 2
        assert calling <= 2 * (1 / BEAT_EVERY_S + 2)  # by the clock: a beat, and the record behind it


def lose_the_store() -> tuple[str, str, float]:
    board = own_board()
    board.agree(b"start")
    dist.barrier()
    if board.rank == 0:
        assert board._courier is not None
        board._courier._store = None  # type: ignore[assignment]
        with patch.object(between_islands.Courier, "_carry", side_effect=RuntimeError("Connection reset by peer")):
            time.sleep(2 * BEAT_EVERY_S)
        board.post(b"what was agreed on goes on")
        board.check()
    start_s = time.monotonic()
    kind, text = raised(lambda: board.agree(b"more", 2.0 if board.rank else None))
    return kind, text, time.monotonic() - start_s


def test_without_its_store_a_group_agrees_on_nothing_new():
    (cut_off, waiting) = run_ranks(on_islands, 2, "ab", lose_the_store)
    for kind, _, took_s in (cut_off, waiting):
        assert kind == PeerTimeout.__name__
        assert took_s < NAMED_WITHIN_S * slowness()
    assert "the store of the process group is out of reach" in cut_off[1]
    assert "rank 0 on a is late" in waiting[1]


def line_to(host: str, secret: bytes = b"of the group") -> list[bool]:
    """Whether a line is open, before and after the other end knows it, and after that is gone."""
    own, peer = Lifelines(0, b"of the group", host), Lifelines(1, secret, host)
    own.connect({1: peer.address})
    seen = [own.is_open(1)]
    peer.accept(1)
    time.sleep(0.1)
    seen += [own.is_open(1), own.is_open(1)]
    peer.close()
    time.sleep(0.1)
    seen.append(own.is_open(1))
    own.close()
    return seen


def test_a_lifeline_is_open_from_when_its_ends_know_each_other_until_one_is_gone():
    assert line_to("127.0.0.1") == [False, True, True, False]
    assert line_to("127.0.0.1", b"of another group") == [False] * 4


def test_a_line_to_nobody_is_closed():
    nobody = Lifelines(1, b"", "192.0.2.1")  # no address of this host
    assert nobody.address.startswith("127.0.0.1 ")
    nobody.close()
    own = Lifelines(0, b"", "127.0.0.1")
    own.connect({1: nobody.address})
    time.sleep(0.1)
    assert not own.is_open(1)
    own.close()


def test_the_own_address_is_that_towards_the_store():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert own_address(dist.HashStore()) == "127.0.0.1"


def test_words_of_a_record_come_over_whole():
    file = SharedFile.create(2 * records.RECORD_BYTES)
    here, there = records.Records(file, 0), records.Records(SharedFile.create(file.size_bytes), 1, far=(0,))
    here.put(records.FINISHED, 7)
    here.put_data(records.ALARM_TEXT, b"why", 8)
    there.receive_heartbeat(0, age_ms=5)
    heartbeat_ms = there.word(0, records.HEARTBEAT_MS)
    there.receive(0, here.snapshot(0))
    assert there.word(0, records.FINISHED) == 7
    assert there.text(0, records.ALARM_TEXT, 8) == "why"
    assert there.word(0, records.HEARTBEAT_MS) == heartbeat_ms
