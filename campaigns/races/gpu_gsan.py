"""Whether Triton's GSan, a detector of races on global memory, sees the races of programs that push, read and reuse.

    PYTHONPATH=.triton-3.9.0:. python -m campaigns.gpu_gsan [--only TEXT] [--at-once 4] [--deadline 200]

Needs one GPU and Triton 3.9, whose GSan keeps a vector clock for every SM of every rank. Two processes share the GPU as
two ranks; their memory is GSan's symmetric memory, their kernel is `copy_kernel` as it is, but for its waits, which are
inline assembly that GSan does not see: they are `tl.atomic_poll` here, each with a deadline. Each program runs right
once, then with each race that is seeded in it (programs.py). Prints a line for each: what was reported, and where. Exit
code 1 if a right program was reported or wrong, or fewer than ten races were.

    TRITON_INTERPRET=1 python -m campaigns.gpu_gsan --dry

runs the right programs on a CPU, with the waits as they are, and shows that every change of text fits its file.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import need_gpus
from campaigns.races.programs import (
    FILES,
    POLL,
    RACES,
    RANK_INTS,
    RIGHT,
    Race,
    call_of,
    changed_text,
    given,
    load_kernel,
    place_of,
    wrong_values,
)
from campaigns.shown import shown

RANKS = 2
# Of a program: two processes that import torch, compile and run. An assertion that fails leaves the shadow of its word
# locked, on which the peer may spin until it is killed.
LIMIT_S = 40
GROUP_S = 30  # of whatever a rank waits for a rank
REPORTED = re.compile(r"([^\s:]+):(\d+)[^\n]*?((?:Read|Write) after (?:read|write) race detected)")
OTHER = re.compile(r"Assertion `([^`']+)|(\w*Error: [^\n]+)")
SEEN_AT_LEAST = 10


class Outcome(NamedTuple):
    """What the ranks of a program said. report: of the detector. trouble: what else went wrong. said: all that they
    printed."""

    race: Race
    report: str = ""
    trouble: str = ""
    seconds: float = 0.0
    said: tuple[str, ...] = ()

    @property
    def is_right_program(self) -> bool:
        return not self.race.name

    def line(self) -> str:
        found = f"REPORTED {self.report}" if self.report else "not reported"
        trouble = f"   ({self.trouble})" if self.trouble else ""
        return f"{self.race.program:8s} {self.race.name or '(right)':52s} {found}{trouble}   {self.seconds:.0f} s"


def programs() -> tuple[Race, ...]:
    """The right programs first, as races of no name."""
    return (*(Race("", name) for name in RIGHT), *RACES)


def run_rank(rank: int, race: Race, folder: Path) -> None:
    """One rank of a program: prints what is wrong with its values, or how its kernels ended."""
    group_of_two = timedelta(seconds=GROUP_S)
    dist.init_process_group("gloo", (folder / "store").as_uri(), group_of_two, RANKS, rank)
    import triton
    from triton.experimental.gsan import symmetric_memory  # type: ignore[import-not-found,unused-ignore]

    torch.cuda.set_device(0)
    group = dist.group.WORLD
    symmetric_memory.configure(group, rng_seed=1)
    memory = symmetric_memory.empty(RANK_INTS, dtype=torch.int32)
    memory.zero_()
    memory[: given(rank).numel()] = given(rank).flatten().cuda()
    torch.cuda.synchronize()
    handle = symmetric_memory.rendezvous(memory, group)
    addresses = [handle.get_buffer(each, (RANK_INTS,), torch.int32).data_ptr() for each in range(RANKS)]
    own_folder = folder / str(rank)
    own_folder.mkdir()
    kernel = load_kernel((POLL, *race.changes), own_folder)
    program = race.table(RIGHT[race.program]())
    calls = [call_of(each, memory, addresses) for each in program if each.rank == rank]
    triton.knobs.compilation.instrumentation_mode = "gsan"
    for each in calls:  # no wait may stand behind a compilation
        kernel.warmup(*each.arguments, grid=(each.blocks,), num_warps=4)
    torch.cuda.synchronize()
    dist.barrier()
    try:
        for each in calls:
            kernel[(each.blocks,)](*each.arguments, num_warps=4)
        torch.cuda.synchronize()
        said = wrong_values(race.program, rank, memory) or "nothing"
        void = sum(bool(each.report.any()) for each in calls)
        print(f"rank {rank}: {said} is wrong, {void} of {len(calls)} launches have void waits", flush=True)
    except RuntimeError as error:  # torch's, of a failed assertion on the device
        print(f"rank {rank}: ended by {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    dist.barrier()  # memory stays mapped until both have ended
    sys.stdout.flush()
    os._exit(0)  # past destructors, which find a broken context


def run_program(race: Race, ends_at: float) -> Outcome:
    """Both ranks, each a process of its own: a report ends the GPU's context."""
    started = time.monotonic()
    limit = min(LIMIT_S, ends_at - started)
    if limit < LIMIT_S / 3:
        return Outcome(race, trouble="not run: no time left")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "campaigns.gpu_gsan", "--folder", folder, "--program", str(_number(race))]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(RANKS)]
        said = []
        for each in ranks:
            try:
                said.append(each.communicate(timeout=max(1.0, started + limit - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                each.kill()
                said.append(each.communicate()[0] + "\nRuntimeError: out of time")
    return judged(race, said, time.monotonic() - started)


def _number(race: Race) -> int:
    return next(at for at, each in enumerate(programs()) if (each.name, each.program) == (race.name, race.program))


def judged(race: Race, said: list[str], seconds: float) -> Outcome:
    """What the output of both ranks says."""
    reports, troubles = [], []
    for rank, text in enumerate(said):
        found = REPORTED.search(text)
        if found:
            reports.append(f"{found[3]} at {Path(found[1]).name}:{found[2]}, rank {rank}")
            continue
        ended = re.search(rf"rank {rank}: (.*)", text)
        other = OTHER.search(text)
        if ended is None or not ended[1].startswith("nothing is wrong, 0 of") or other is not None:
            last = (other and (other[1] or other[2])) or (ended and ended[1]) or text.strip()[-200:]
            troubles.append(f"rank {rank}: {last}")
    return Outcome(race, "; ".join(reports), "; ".join(troubles), seconds, tuple(said))


def run_all(chosen: tuple[Race, ...], at_once: int, deadline_s: float) -> Iterator[Outcome]:
    """The first one alone: it compiles what all others find compiled."""
    ends_at = time.monotonic() + deadline_s
    yield run_program(chosen[0], ends_at)
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(partial(run_program, ends_at=ends_at), chosen[1:])


def run_dry() -> None:
    """The right programs on a CPU, one launch behind the other, and the changes of all others as text."""
    from overweave.runtime.interpreted import interpreter

    interpreter.repair()
    kernel = load_kernel((), Path())
    for name, program in RIGHT.items():
        memories = [torch.zeros(RANK_INTS, dtype=torch.int32) for _ in range(RANKS)]
        for rank, memory in enumerate(memories):
            memory[place_of("given") :][: given(rank).numel()] = given(rank).flatten()
        addresses = [memory.data_ptr() for memory in memories]
        for launch in program():
            call = call_of(launch, memories[launch.rank], addresses)
            kernel[(call.blocks,)](*call.arguments)
        wrong = [wrong_values(name, rank, memory) for rank, memory in enumerate(memories)]
        print(f"{name:8s} {len(program())} launches, {'wrong: ' + str(wrong) if any(wrong) else 'right'}")
        if any(wrong):
            sys.exit(1)
    for race in RACES:
        texts = [changed_text(module, (POLL, *race.changes)) for module in FILES]
        for text in texts:
            compile(text, "changed", "exec")
        tables = "kept" if race.table(RIGHT[race.program]()) == RIGHT[race.program]() else "changed"
        print(f"{race.program:8s} {race.name:52s} {len(race.changes)} changes of text, tables {tables}")


def tell(outcomes: list[Outcome]) -> int:
    """The verdict over all lines."""
    right = [each for each in outcomes if each.is_right_program]
    seen = [each for each in outcomes if each.race.is_seen and not each.is_right_program]
    wrong = [each for each in right if each.report or each.trouble]
    found = sum(bool(each.report) for each in seen)
    for each in wrong[:1]:
        print(f"--- {each.race.program}", *(text[-1500:] for text in each.said), sep="\n")
    print(
        f"{found} of {len(seen)} seeded races reported; {len(wrong)} of {len(right)} right programs reported or wrong"
    )
    return int(bool(wrong) or found < min(SEEN_AT_LEAST, len(seen)))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose line contains this text; a right one is `(right)`")
    parser.add_argument("--at-once", type=int, default=4, help="how many programs share the GPU")
    parser.add_argument("--deadline", type=float, default=200, help="seconds for all programs")
    parser.add_argument("--dry", action="store_true", help="on a CPU, without the detector")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--program", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.rank is not None:
        run_rank(asked.rank, programs()[asked.program], asked.folder)
    if asked.dry:
        run_dry()
        return 0
    need_gpus()
    chosen = tuple(each for each in programs() if asked.only in f"{each.program} {each.name or '(right)'}")
    outcomes = []
    for outcome in shown(run_all(chosen, asked.at_once, asked.deadline), "programs", len(chosen)):
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
    return tell(outcomes)


if __name__ == "__main__":
    sys.exit(main())
