"""Groups that come and go: destroyed, inherited by a fork, shared by threads; and what is kept for them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import GroupError, InputError, OverweaveError
from overweave.ops.call import groups as known_groups
from overweave.ops.call import prepared
from overweave.runtime.host.emulate import HostCall
from overweave.runtime.host.processes import RankProcesses
from tests.ops.calls import is_right, small_call
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
EVERY = [0, 1]
PATIENCE_S = 30.0


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as caught:
        act()
    return str(caught.value)


def use_and_destroy() -> list[str]:
    group = dist.new_group(EVERY)
    calls = [partial(is_right, small_call(name, 12), 0, group) for name in OPERATORS]
    assert all(call() for call in calls)
    dist.destroy_process_group(group)
    return [refusal(act) for act in (*calls, partial(ow.check, group), partial(ow.reset, group))]


def test_a_destroyed_group_is_refused():
    for told in run_ranks(use_and_destroy, 2):
        assert len(told) == 5
        assert all("it was destroyed" in text for text in told)


def held() -> list[int]:
    """Open files, threads, and mappings of memory that ranks share."""
    own = Path("/proc/self")
    shared = (own / "maps").read_text().count("memfd:overweave")
    return [len(list((own / "fd").iterdir())), len(list((own / "task").iterdir())), shared]


def come_and_go(groups: int) -> list[list[int]]:
    found: list[list[int]] = []
    for number in range(groups):
        group = dist.new_group(EVERY)
        for name, plan in zip(OPERATORS, ("push", "sequential", "two_shot"), strict=True):
            assert is_right(small_call(name, 12, plan=plan), 0, group)
        if number == 2:
            found.append(held())
        dist.barrier(group)  # a rank that closes connections must not do so while its peer still calls
        dist.destroy_process_group(group)
    deadline_s = time.monotonic() + PATIENCE_S  # connections close in threads, late on a busy machine
    while any(now > then for now, then in zip(held(), found[0], strict=True)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return [*found, held(), [len(known_groups._GROUPS), len(prepared.CALLS), 0]]


def test_nothing_is_kept_for_groups_that_are_gone():
    """Behind eight groups there is no more than there was with the third."""
    for then, now, known in run_ranks(come_and_go, 2, 8):
        assert all(later <= earlier for later, earlier in zip(now, then, strict=True)), (then, now)
        assert known[:2] == [2, 1] or known[:2] == [1, 1]


def compiled_for_two() -> int:
    groups = [dist.new_group(EVERY) for _ in range(2)]
    compiled = prepared.AgreedCall("a kernel", b"", lambda given: None)
    prepared.calls_of(known_groups.group_of(groups[0])).put(("a call",), compiled)
    dist.destroy_process_group(groups[0])
    known_groups.group_of(groups[1])
    return sum(compiled in calls.values() for calls in prepared.CALLS.values())


def test_compiled_kernels_keep_nothing_either():
    assert run_ranks(compiled_for_two, 2) == [0, 0]


def look_alone() -> bool:
    if dist.get_rank() == 0:
        ow.check()
    return True


def test_check_waits_for_nobody():
    assert run_ranks(look_alone, 2) == [True, True]


def be_refused_and_leave() -> str:
    assert is_right(small_call("all_gather_matmul", 12))
    with pytest.raises(InputError):
        ow.all_gather_matmul(torch.ones(4, 8), torch.ones(3, 8))
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(0.3)
    ow.check()
    return "nothing to report"


def test_a_rank_may_leave_after_a_call_that_was_refused():
    with RankProcesses(be_refused_and_leave, 2, group_timeout_s=10) as ranks:
        first, _ = ranks.wait(30)
    assert first.value == "nothing to report", first.message


def fork_one() -> list[Any]:
    """Rank 0 forks; the child calls, which must not pass for a call of its parent's."""
    call = small_call("matmul_all_reduce", 12)
    told: list[Any] = [is_right(call)]
    if dist.get_rank() == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, refusal(partial(is_right, call)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        told.append(os.read(reader, 1000).decode())
        os.waitpid(child, 0)
    return [*told, is_right(call, 1), is_right(call, 2)]


def test_a_forked_process_does_not_call_in_its_parents_name():
    first, second = run_ranks(fork_one, 2)
    assert "this process was forked from the rank that made it" in first.pop(1)
    assert first == second == [True] * 3


def call_from_threads(threads: int, turns: int) -> list[str]:
    """All with the same numbers: which thread meets which of the peer's is nobody's to say."""
    x, w, wrong = torch.ones(4, 8), torch.ones(8, 16), []

    def body() -> None:
        try:
            for _ in range(turns):
                if not bool(ow.matmul_all_reduce(x, w).eq(16).all()):
                    wrong.append("another result")
        except OverweaveError as error:
            wrong.append(str(error))

    sys.setswitchinterval(1e-5)
    together([body] * threads)
    return wrong


def together(bodies: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own, to its end."""
    running = [threading.Thread(target=body) for body in bodies]
    for each in running:
        each.start()
    for each in running:
        each.join()


def test_threads_take_turns_on_a_group():
    assert run_ranks(call_from_threads, 2, 3, 60) == [[], []]


def meet_from_threads(threads: int, turns: int) -> list[str]:
    """Groups that are new to us, met by a thread each at once."""
    groups, wrong = [dist.new_group([0]) for _ in range(threads)], list[str]()
    sys.setswitchinterval(1e-6)
    for _ in range(turns):
        known_groups._GROUPS.clear()
        start = threading.Barrier(threads)

        def body(group: dist.ProcessGroup, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                known_groups.group_of(group)
            except RuntimeError as error:
                wrong.append(str(error))

        together([partial(body, group) for group in groups])
    return wrong


def test_threads_may_meet_groups_at_once():
    assert run_ranks(meet_from_threads, 1, 6, 100) == [[]]


def fail_where_there_are_gpus() -> list[bool]:
    """CPU tensors on a machine with GPUs, which nothing has used."""
    call = small_call("matmul_all_reduce", 12)
    with patch.multiple(torch.cuda, is_available=lambda: True, current_device=lambda: 0, synchronize=lambda *_: None):
        told = [is_right(call)]
        if dist.get_rank() == 1:
            with patch.object(HostCall, "_execute", side_effect=MemoryError), pytest.raises(MemoryError):
                is_right(call, 1)
        else:
            with pytest.raises(OverweaveError):
                is_right(call, 1)
        ow.reset()
        return [
            *told,
            is_right(call, 2),
            ow.symmetric_empty((2, 3), torch.float32, device=torch.device("cpu")).numel() == 6,
        ]


def test_a_reset_mends_calls_on_the_cpu_of_a_machine_with_gpus():
    assert run_ranks(fail_where_there_are_gpus, 2) == [[True] * 3] * 2
