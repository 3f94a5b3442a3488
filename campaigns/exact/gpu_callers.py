"""Do calls come through however a program makes them? On many streams, in several groups, from threads, from memory.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_callers [--trials 48] [--parts groups]

streams: calls of one group, each on a stream that this rank draws, behind work that may hold that stream up.
groups: three groups of the same ranks, each on a stream of its own, in one order on all ranks; each plan in all three,
then any plan in any. threads: three on one group, each on its own stream. kept: memory that calls hold after their
tensors are gone, which must not grow. given_back: inputs in memory that torch gave back to the driver and got anew at
the same address. devices: from a thread whose current GPU is not its tensors', if there are two.
No call may fail or run out of time, and every result is compared.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import ALL_REDUCE, BY_ENGINES
from campaigns.exact.calls import Case, Inputs, expected, make_inputs, run
from campaigns.gpu_ranks import Check, arguments, report, run_campaign
from campaigns.rates.gpu_beside import SHAPES
from overweave.errors import OverweaveError
from overweave.ops.call.groups import group_of
from overweave.schedules.records.outside import TORCH_ONE_SHOT
from overweave.tuner.measure.baselines import SEQUENTIAL
from overweave.tuner.measure.timer import SIGHTS

LANES = 3  # streams, groups or threads
LONGEST_HOLD = 400_000  # cycles that a stream is held up: some 200 us, longer than most calls
PLANS = (*BY_ENGINES, (ALL_REDUCE, SEQUENTIAL), (ALL_REDUCE, TORCH_ONE_SHOT))


class Work(NamedTuple):
    """A case with its tensors and what it must give."""

    case: Case
    inputs: Inputs
    wanted: torch.Tensor


class Lane:
    """A stream with calls of a group on it, or whichever is the caller's, and how many of their results were wrong."""

    def __init__(self, group: dist.ProcessGroup | None, has_stream: bool = True) -> None:
        self._group, self._stream = group, torch.cuda.Stream() if has_stream else None
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def call(self, work: Work, hold: int) -> None:
        """One call, on this stream from its inputs to what is compared; `hold` cycles pass there before it."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            torch.cuda._sleep(hold)
            inputs = work.inputs._replace(x=work.inputs.x.clone())  # made on this stream, a moment ago
            self.wrong += (run(work.case, inputs, self._group) != work.wanted).any()


def prepared(plans: Sequence[tuple[str, str | None]]) -> list[Work]:
    """Every plan on its operator's shape."""
    found = []
    for operator, plan in plans:
        case = Case(operator, *SHAPES[operator], torch.bfloat16, False, plan)
        inputs = make_inputs(case, 1, exact=True)
        found.append(Work(case, inputs, expected(case, inputs, torch.float32).to(case.dtype)))
    return found


def attempt(lanes: Sequence[Lane], groups: Sequence[dist.ProcessGroup | None], trials: Callable[[], None]) -> list[str]:
    """What went wrong in trials on lanes; afterwards the groups are fit for use again."""
    torch.cuda.synchronize()
    dist.barrier()
    failures = []
    try:
        trials()
        for group in groups:
            ow.check(group)
    except OverweaveError as error:
        failures.append(str(error))
    torch.cuda.synchronize()
    if not report.all_agree(not failures):
        for group in groups:
            ow.reset(group)
    failures += [f"{int(lane.wrong)} results differ" for lane in lanes if int(lane.wrong)]
    for lane in lanes:
        lane.wrong.zero_()
    return failures


def of_each(
    part: str, works: Sequence[Work], lanes: Sequence[Lane], calls: int, trials: Callable[[Work], None]
) -> Iterator[Check]:
    """For each plan: what went wrong in so many calls of it, on lanes of one group."""
    for work in works:
        yield Check(f"{part}: {work.case.name}", partial(attempt, lanes, [None], partial(trials, work)), calls)


def on_streams(works: Sequence[Work], count: int) -> Iterator[Check]:
    """One group, whose calls come from any stream."""
    lanes, own = [Lane(None) for _ in range(LANES)], random.Random(dist.get_rank())

    def trials(work: Work) -> None:
        for _ in range(count):
            own.choice(lanes).call(work, own.randrange(LONGEST_HOLD))

    yield from of_each("streams", works, lanes, count, trials)


def in_groups(works: Sequence[Work], count: int) -> Iterator[Check]:
    """Several groups of the same ranks at once, which meet in one order on every rank."""
    deadline = timedelta(seconds=group_of(None).timeout_s)  # a new group's own would be ten minutes
    groups = [dist.new_group(timeout=deadline) for _ in range(LANES)]
    lanes, own, shared = [Lane(group) for group in groups], random.Random(dist.get_rank()), random.Random(5)

    def trials(choice: Sequence[Work]) -> None:
        for trial in range(count):
            for lane in shared.sample(lanes, LANES):
                lane.call(shared.choice(choice), own.randrange(LONGEST_HOLD))
            if trial % 8 == 7:
                torch.cuda.synchronize()  # else the host runs far ahead, and few trials start from idle GPUs

    for name, choice in [*((work.case.name, [work]) for work in works), ("any plan beside any", works)]:
        yield Check(f"groups: {name}", partial(attempt, lanes, groups, partial(trials, choice)), LANES * count)


def from_threads(works: Sequence[Work], count: int) -> Iterator[Check]:
    """All threads make the same calls: which of them meets which of a peer's is nobody's to say."""
    lanes, home = [Lane(None) for _ in range(LANES)], torch.cuda.current_device()
    yield from of_each("threads", works, lanes, LANES * count, partial(in_threads, lanes, home, count))


def on_devices(works: Sequence[Work], count: int) -> Iterator[Check]:
    """As a thread that nobody told which GPU is its own."""
    lanes, gpus = [Lane(None, has_stream=False)], torch.cuda.device_count()
    if gpus > 1:
        away = (torch.cuda.current_device() + 1) % gpus
        yield from of_each("devices", works, lanes, count, partial(in_threads, lanes, away, count))


def in_threads(lanes: Sequence[Lane], device: int, count: int, work: Work) -> None:
    """`count` calls on every lane, by a thread each whose current device is this. Raises what any of them raised."""

    def body(lane: Lane) -> None:
        own = random.Random(dist.get_rank())
        torch.cuda.set_device(device)
        for _ in range(count):
            lane.call(work, own.randrange(LONGEST_HOLD))

    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(body, lanes))


def kept(works: Sequence[Work], count: int) -> Iterator[Check]:
    """Tensors that are new at every call, and dropped behind it."""
    for work in works:
        yield Check(f"kept: {work.case.name}", partial(_kept, work, count), 3 * count)


def _kept(work: Work, count: int) -> list[str]:
    held = []
    for call in range(3 * count):
        fresh = work.inputs._replace(x=work.inputs.x.clone(), w=work.inputs.w.clone())
        spare = torch.empty(1 + (call % 7) * (1 << 16), device="cuda")  # so that addresses move on
        run(work.case, fresh)
        del fresh, spare
        if call % count == count - 1:
            torch.cuda.synchronize()
            gc.collect()
            held.append(torch.cuda.memory_allocated())
    grown = held[-1] - held[-2]
    return [f"{grown} bytes more after {count} calls more"] if grown > 0 else []


def given_back(works: Sequence[Work], count: int) -> Iterator[Check]:
    """Inputs in memory that goes back to the driver behind their calls, and comes from it anew at the same address."""
    for work in works:
        yield Check(
            f"given back: {work.case.name}",
            partial(attempt, [lane := Lane(None, False)], [None], partial(_given_back, lane, work, count)),
            count,
        )


def _given_back(lane: Lane, work: Work, count: int) -> None:
    addresses = []
    for _ in range(count):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = work.inputs.x.clone()
        addresses.append(x.data_ptr())
        for _ in range(SIGHTS + 1):
            lane.wrong += (run(work.case, work.inputs._replace(x=x)) != work.wanted).any()
        torch.cuda.synchronize()
        del x, pool
        torch.cuda.empty_cache()
    assert len(set(addresses)) < count, "no address came back: nothing was tried"


PARTS = {
    "streams": on_streams,
    "groups": in_groups,
    "threads": from_threads,
    "kept": kept,
    "given_back": given_back,
    "devices": on_devices,
}


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    works = prepared([one for one in PLANS if asked.plans in ".".join(map(str, one))])
    for part in asked.parts:
        yield from PARTS[part](works, asked.trials)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=8)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--plans", default="", help="plans whose name, as OPERATOR.PLAN, contains this text")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
