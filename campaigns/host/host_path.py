"""What Python does for an eager call, counted without a GPU: from the public function to the launch, plan by plan.

    python -m campaigns.host_path [--calls N] [--cold] [--styles [--beside FOLDER]]

calls: functions of Python that one call enters. C: built-in functions that it calls. us: how long it takes here, in the
mean, with a driver that does nothing (campaigns/host/no_gpu.py); a GPU's driver comes on top of it, and so does the
work of torch's allocator there. `replayed`: the tensors come back to the same places, so the call is one graph.
`launched`: they do not. A library's plan is never replayed. --cold: the first call of a signature on CPU ranks
(cpu_calls). --styles: a module of a plan, forward and backward (host_styles.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.host import no_gpu
from campaigns.host.host_cases import CASES, Case, Sizes, call_of
from campaigns.host.no_gpu import Graph, group_without_gpus
from overweave.memory.board.records import ENTRIES, Pause
from overweave.ops.call import groups, prepared
from overweave.runtime.host.processes import run_ranks

# What Python does for calls on two CPU ranks, `push` with bias and silu: the first of a signature, and a later one.
# `python -m campaigns.host_path --cold` prints it. What imports of modules do is left out, and all looks at peers that
# were in vain, so that what is counted is the work of the call: checks, agreement, the choice of a plan, its schedule
# and proof, binding, and the emulated run itself.
# files: of the package, that the first call enters.

WORLD_SIZE, M, N, K = 2, 64, 32, 32
PLANS = ("push", None)
WARM_CALLS = 100  # a call that waits for its peer polls: the least of so many does not
_IMPORT = "_find_and_load"  # the function of importlib under which a module's code runs
_PACKAGE = str(Path(ow.__file__).parent)
# A loop that waits makes a pause when it begins and after whatever came, and calls it after each look in vain.
_NEW_PAUSE, _LOOKED_IN_VAIN = Pause.__init__.__code__, Pause.__call__.__code__


class CpuCalls(NamedTuple):
    """What rank 0 enters. cold: functions of Python in the first call, by file name. warm: how many in a later one.
    files: of the package, in the first call."""

    cold: Counter[str]
    warm: int
    files: int


def cpu_calls(plan: str | None) -> CpuCalls:
    """Count the calls of one signature; plan: as the caller names it."""
    cold, *counts = run_ranks(_count_calls, WORLD_SIZE, plan)[0]
    return CpuCalls(Counter(cold), *counts)


def _count_calls(plan: str | None) -> tuple[dict[str, int], int, int]:
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((M // WORLD_SIZE, K), (K, N), (N,)))
    given: dict[str, Any] = {"bias": bias, "activation": "silu", "plan": plan}
    with torch.no_grad():
        cold = _entered(lambda: ow.all_gather_matmul(x, w, **given))
        later = [_entered(lambda: ow.all_gather_matmul(x, w, **given)).total() for _ in range(WARM_CALLS)]
    by_name: Counter[str] = Counter()
    for file, count in cold.items():
        by_name[Path(file).name] += count
    return dict(by_name), min(later), sum(file.startswith(_PACKAGE) for file in cold)


def _entered(call: Callable[[], object]) -> Counter[str]:
    """Return how many functions of each file a call enters, without those of imports and of looks in vain."""
    entered: Counter[str] = Counter()
    before_look: Counter[str] = Counter()
    importing = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal importing, before_look
        is_import = frame.f_code.co_name == _IMPORT
        if event == "call" and not importing and not is_import:
            if frame.f_code is _NEW_PAUSE:
                before_look = entered.copy()
            elif frame.f_code is _LOOKED_IN_VAIN:
                entered.clear()
                entered.update(before_look)
            else:
                entered[frame.f_code.co_filename] += 1
        importing += is_import * ((event == "call") - (event == "return"))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def print_cold(most: int = 8) -> None:
    """Print a line for each way to name the plan, with the files that most calls are in."""
    for plan in PLANS:
        found = cpu_calls(plan)
        names = ", ".join(f"{name} {count}" for name, count in found.cold.most_common(most))
        print(f"{found.cold.total():6d} calls in {found.files} files cold, {found.warm} warm, plan={plan}: {names}")


# What a module of a plan costs the host, beside what it costs in another checkout of overweave.

TURNS = 3
HERE = Path(__file__).parents[2]
Entered = list[float]  # functions of Python, functions of C, us


def print_styles(beside: str, calls: int) -> None:
    """A line for each pass; beside another checkout, the least of several turns of both, and their ratios."""
    folders = [str(HERE), *([beside] if beside else [])]
    turns = [{folder: _asked(folder, calls) for folder in folders} for _ in range(TURNS if beside else 1)]
    least = {
        folder: {
            name: [min(each) for each in zip(*(turn[folder][name] for turn in turns), strict=True)] for name in known
        }
        for folder, known in turns[0].items()
    }
    for name, (calls, builtin, us) in least[str(HERE)].items():
        line = f"{calls:5.0f} calls {builtin:5.0f} C {us:7.1f} us  {name}"
        if beside:
            others, _, other_us = least[beside][name]
            line += f", beside {others:.0f} calls, {other_us:.1f} us"
            line += f": {calls / others:.3f} of its calls, {us / other_us:.3f} of its time"
        print(line)


def _asked(folder: str, calls: int) -> dict[str, Entered]:
    """The costs of a checkout, in a process of its own."""
    command = [sys.executable, "-P", str(HERE / "campaigns" / "host" / "host_styles.py"), str(calls)]
    environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Entered] = json.loads(answer.stdout.splitlines()[-1])
    return found


SIZES = Sizes(ranks=4, m=512, n=256, k=128)


class Count(NamedTuple):
    """What a call enters: functions of Python, by name, and how many of C."""

    python: Counter[str]
    builtin: int

    @property
    def calls(self) -> int:
        return self.python.total()


def counted(call: Callable[[], object]) -> Count:
    """The functions that a call enters; the least of three calls, as now and then one looks after its peers, too."""
    return min((_counted_once(call) for _ in range(3)), key=lambda count: count.calls)


def _counted_once(call: Callable[[], object]) -> Count:
    python: Counter[str] = Counter()
    builtin = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal builtin
        code = frame.f_code
        if event == "call" and code.co_filename not in (no_gpu.FILE, __file__):
            python[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1
        elif event == "c_call":
            builtin += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Count(python, builtin - 1)  # setprofile itself


def timed_us(call: Callable[[], object], calls: int) -> float:
    """Of this thread, the mean of the quickest of several bursts: other processes are no part of it."""
    if not calls:
        return 0.0
    best = float("inf")
    for _ in range(5):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time_ns() - start) / calls / 1e3)
    return best


class Cost(NamedTuple):
    """What one call costs the host, in one of its ways."""

    case: Case
    way: str
    entered: Count
    us: float

    def __str__(self) -> str:
        numbers = f"{self.entered.calls:4d} calls {self.entered.builtin:4d} C {self.us:7.1f} us"
        return f"{numbers}  {self.way:9s} {self.case}"


MOST_WARM = 100  # calls until the tensors of one lie where others did


def costs(case: Case, process_group: dist.ProcessGroup, calls: int) -> Iterator[Cost]:
    """Every way of a call. calls: over how many its time is the mean; 0: it is not asked for."""
    call = call_of(case, process_group, SIZES)
    for _ in range(ENTRIES):  # until every entry of the board says what this call is
        call()
    bound: Any = prepared.CALLS[process_group].latest().bound
    if getattr(bound, "_may_replay", False):
        before, warm = Graph.replayed, 0
        while Graph.replayed < before + 4 and warm < MOST_WARM:
            call()
            warm += 1
        yield Cost(case, "replayed", counted(call), timed_us(call, calls))
        bound._may_replay = False
    call()
    yield Cost(case, "launched", counted(call), timed_us(call, calls))


@contextmanager
def ready(ranks: int = SIZES.ranks) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone that the operators take for one of several GPUs."""
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with group_without_gpus(ranks) as group:
                groups._GROUPS[group.process_group] = group
                yield group.process_group
        finally:
            prepared.CALLS.clear()
            groups._GROUPS.clear()
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="over how many calls a time is the mean")
    parser.add_argument("--of", default="", help="only cases that contain this")
    parser.add_argument("--functions", action="store_true", help="name every function that a call enters")
    parser.add_argument("--cold", action="store_true", help="count the first call of a signature, on CPU ranks")
    parser.add_argument("--styles", action="store_true", help="count the passes of a module of a plan")
    parser.add_argument("--beside", default="", help="another checkout, whose styles are counted in turns with these")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.styles:
        print_styles(asked.beside, asked.calls)
        return
    if asked.cold:
        print_cold()
        return
    with ready() as group, torch.no_grad():
        for case in CASES:
            if asked.of in str(case):
                for cost in costs(case, group, asked.calls):
                    print(cost)
                    if asked.functions:
                        print(*(f"      {n:3d} {name}" for name, n in cost.entered.python.most_common()), sep="\n")


if __name__ == "__main__":
    main()
