"""Kills or stops a random rank at a random moment, many times: do all survivors raise the right error in time?

    python -m campaigns.faults --count 50 --depth library

A trial passes if every survivor raises PeerDied (killed) or PeerTimeout (stopped) within its limit, fills its output
with NaN, refuses the next call, and every result before that was right.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from campaigns.cases import PLAIN
from campaigns.exact.calls import Case
from campaigns.exact.exactness import make_data
from campaigns.shown import shown
from overweave.errors import PeerDied, PeerTimeout, WorkspaceBroken
from overweave.memory.group import resolve
from overweave.runtime.host.host import Depth, run_on_host
from overweave.runtime.host.processes import ProcessOutcome, RankProcesses

DEADLINE_S = 2.0
START_WITHIN_S = 10.0
DIED_WITHIN_S = 2.0
TIMEOUT_GRACE_S = 1.0
SCHEDULES = tuple(plain.full_name for plain in PLAIN)
FUSED = tuple(plain.full_name for plain in PLAIN if plain.method.has_kernels)


@dataclass(frozen=True)
class Trial:
    """One fault. delay_s: how long after every rank's first call it strikes."""

    schedule: str
    world_size: int
    victim: int
    signal: signal.Signals
    delay_s: float
    depth: Depth


def trials(count: int, depth: Depth, seed: int) -> Iterator[Trial]:
    """`count` random faults, half of them deaths."""
    chance = random.Random(seed)
    names = SCHEDULES if depth == "library" else FUSED
    for index in range(count):
        world_size = chance.choice((2, 3, 4))
        number = (signal.SIGKILL, signal.SIGSTOP)[index % 2]
        delay_s = chance.uniform(0.0, 0.4)
        yield Trial(names[index // 2 % len(names)], world_size, chance.randrange(world_size), number, delay_s, depth)


def run(trial: Trial) -> tuple[list[str], int]:
    """Why the trial failed, nothing if it passed; and how many calls had passed by then."""
    ready, tell_ready = os.pipe()
    with RankProcesses(_call_for_ever, trial.world_size, trial, tell_ready, group_timeout_s=20.0) as ranks:
        for _ in range(trial.world_size):
            if select.select([ready], [], [], START_WITHIN_S)[0]:
                os.read(ready, 1)
        time.sleep(trial.delay_s)
        struck_s = time.monotonic()
        ranks.kill(trial.victim, number=trial.signal)
        survivors = [rank for rank in range(trial.world_size) if rank != trial.victim]
        outcomes = ranks.wait(DEADLINE_S + 15.0, *survivors)
    os.close(ready)
    os.close(tell_ready)
    reasons = [f"rank {outcome.rank}: {reason}" for outcome in outcomes for reason in _judge(trial, outcome, struck_s)]
    return reasons, max((outcome.value["calls"] for outcome in outcomes if outcome.value), default=0)


def _judge(trial: Trial, outcome: ProcessOutcome, struck_s: float) -> Iterator[str]:
    if outcome.error or outcome.exit_signal:
        yield outcome.message or f"did not end (signal {outcome.exit_signal})"
        return
    told = outcome.value
    died = trial.signal == signal.SIGKILL
    wanted, limit_s = ("PeerDied", DIED_WITHIN_S) if died else ("PeerTimeout", DEADLINE_S + TIMEOUT_GRACE_S)
    took_s = told["raised_s"] - struck_s
    if told["error"] != wanted:
        yield f"raised {told['error']} instead of {wanted}: {told['message']}"
    if took_s > limit_s:
        yield f"took {took_s:.2f} s, {limit_s} s allowed"
    if f"rank {trial.victim} " not in told["message"]:
        yield f"does not name rank {trial.victim}: {told['message']}"
    for key in ("is_void", "refuses", "was_right"):
        if not told[key]:
            yield f"{key} is false after {told['calls']} calls"


def _call_for_ever(trial: Trial, tell_ready: int) -> dict[str, Any]:
    """What each rank does: calls with new integer inputs, every result compared, until something is raised."""
    group = resolve(None)
    plan = _case(trial).built(trial.world_size)
    calls, was_right = 0, True
    while True:
        data = make_data(plan.problem, group.rank, calls)
        inputs, expected = {"x": data.x, "w": data.w}, data.exact.float()
        # NaN shows what was not written; zeros show that a void result is made NaN.
        output = torch.full_like(expected, torch.nan if calls % 2 else 0.0)
        try:
            run_on_host(plan, group, inputs, {"y": output}, depth=trial.depth, timeout_s=DEADLINE_S)
        except (PeerDied, PeerTimeout) as error:
            raised_s = time.monotonic()
            is_void = bool(output.isnan().all())
            try:
                run_on_host(plan, group, inputs, {"y": output}, depth=trial.depth, timeout_s=DEADLINE_S)
                refuses = False
            except WorkspaceBroken:
                refuses = True
            return {
                "error": type(error).__name__,
                "message": str(error),
                "raised_s": raised_s,
                "is_void": is_void,
                "refuses": refuses,
                "was_right": was_right,
                "calls": calls,
            }
        if not calls:
            os.write(tell_ready, b"!")
        calls += 1
        was_right = was_right and torch.equal(output, expected)


def _case(trial: Trial) -> Case:
    n, k = (96, 64) if trial.depth == "library" else (32, 32)
    m = 8 * trial.world_size * (4 if trial.depth == "library" else 2)
    operator, _, plan = trial.schedule.partition(".")
    return Case(operator, m, n, k, torch.float32, plan=plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--depth", choices=("library", "interpreter"), default="library")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.depth == "interpreter":
        import_module("overweave.runtime.host.interpreted")  # once, before the ranks fork
    failed = 0
    done = 0
    for trial in shown(trials(arguments.count, arguments.depth, arguments.seed), "faults", arguments.count):
        reasons, calls = run(trial)
        failed += bool(reasons)
        print(f"{done}: {trial}, after {calls} calls: {'; '.join(reasons) or 'passed'}", flush=True)
        done += 1
    print(f"{done - failed} of {arguments.count} faults were handled as promised")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
