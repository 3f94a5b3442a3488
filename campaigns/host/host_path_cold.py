"""What Python does for calls on two CPU ranks, `push` with bias and silu: the first of a signature, and a later one.

`python -m campaigns.host_path --cold` prints it. What imports of modules do is left out, so that what is counted is the
work of the call: checks, agreement, the choice of a plan, its schedule and proof, binding, and the emulated run itself.
files: of the package, that the first call enters.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import overweave as ow
from overweave.runtime.host.processes import run_ranks

WORLD_SIZE, M, N, K = 2, 64, 32, 32
PLANS = ("push", None)
WARM_CALLS = 100  # a call that waits for its peer polls: the least of so many does not
_IMPORT = "_find_and_load"  # the function of importlib under which a module's code runs
_PACKAGE = str(Path(ow.__file__).parent)


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
    """Return how many functions of each file a call enters, without those of imports."""
    entered: Counter[str] = Counter()
    importing = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal importing
        is_import = frame.f_code.co_name == _IMPORT
        if event == "call" and not importing and not is_import:
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
