"""The frame of campaigns among CPU ranks: worlds of several sizes in turn, each with the checks of GPU campaigns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

from campaigns.gpu_ranks import Check, Report, run_campaign
from campaigns.shown import shown
from overweave.runtime.host.processes import run_ranks

WORLDS = (2, 3, 4, 8)
LONGEST_S, LATE_S = 3600.0, 120.0  # of all checks in a world; that a rank may be behind the others
Checks = Callable[[argparse.Namespace, str], Iterable[Check]]


def run_on_any_ranks(parser: argparse.ArgumentParser, checks: Checks, worlds: tuple[int, ...] = WORLDS) -> int:
    """Runs checks, on `cuda` where torchrun has started the ranks, else on `cpu` in every world; 1 if any failed."""
    parser.add_argument("--worlds", type=int, nargs="*", default=worlds, help="how many CPU ranks, in turn")
    parser.add_argument("--seed", type=int, default=0)
    if "LOCAL_RANK" in os.environ:
        run_campaign(parser, lambda asked: checks(asked, "cuda"))
    asked = parser.parse_args()
    failed = 0
    for ranks in shown(asked.worlds, "worlds", len(asked.worlds), lambda ranks: f"W={ranks}"):
        print(f"W={ranks}", flush=True)
        failed += sum(run_ranks(_run, ranks, checks, asked, timeout_s=LONGEST_S, group_timeout_s=LATE_S))
    return int(failed > 0)


def _run(checks: Checks, asked: argparse.Namespace) -> int:
    return Report("cpu").run(check for check in checks(asked, "cpu") if asked.only in check.name)
