"""What Python does for the first call of a signature: CPU ranks, two of them, `push` with bias and silu.

`python -m campaigns.host_path --cold` prints it. What imports of modules do is left out, so that what is counted is the
work of the call: checks, agreement, the choice of a plan, its schedule and proof, binding, and the emulated run itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import overweave as ow
from overweave.runtime.host.processes import run_ranks

WORLD_SIZE, M, N, K = 2, 64, 32, 32
PLANS = ("push", None)
_IMPORT = "_find_and_load"  # the function of importlib under which a module's code runs


def cold_calls(plan: str | None) -> Counter[str]:
    """The functions of Python that the first call enters on rank 0, by file; plan: as the caller names it."""
    return Counter(run_ranks(_first_call, WORLD_SIZE, plan)[0])


def _first_call(plan: str | None) -> dict[str, int]:
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((M // WORLD_SIZE, K), (K, N), (N,)))
    given: dict[str, Any] = {"bias": bias, "activation": "silu"}
    entered: Counter[str] = Counter()
    importing = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal importing
        is_import = frame.f_code.co_name == _IMPORT
        if event == "call" and not importing and not is_import:
            entered[Path(frame.f_code.co_filename).name] += 1
        importing += is_import * ((event == "call") - (event == "return"))

    with torch.no_grad():
        sys.setprofile(note)
        try:
            ow.all_gather_matmul(x, w, **given, plan=plan)
        finally:
            sys.setprofile(None)
    return dict(entered)


def print_cold(most: int = 8) -> None:
    """A line for each way to name the plan, and the files that most calls are in."""
    for plan in PLANS:
        entered = cold_calls(plan)
        files = ", ".join(f"{name} {count}" for name, count in entered.most_common(most))
        print(f"{entered.total():6d} calls  cold, plan={plan}: {files}")
