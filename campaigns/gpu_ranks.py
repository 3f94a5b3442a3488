"""The frame of GPU campaigns among ranks: joining torchrun's world, a line for each check, one verdict of all ranks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

import overweave as ow
from overweave.cli.progress import progress
from overweave.hardware.multicast import require_off
from overweave.tuner.measure.bench import SHARED_GPU

_T = TypeVar("_T")
START_UP = timedelta(minutes=2)  # that ranks have to load torch and a GPU's context


def spread_over(items: Sequence[_T], count: int) -> list[_T]:
    """`count` of the items, or all where there are fewer, as far apart as they go: what a short run looks at."""
    chosen = min(count, len(items))
    return [items[(2 * index + 1) * len(items) // (2 * chosen)] for index in range(chosen)]


def need_gpus() -> None:
    """Ends the process where there are none, or where they may be used by multicast: at once, and not behind minutes of
    compiling.
    """
    if not torch.cuda.device_count():
        sys.exit("this campaign runs on NVIDIA GPUs, and torch sees none")
    require_off("run a campaign on GPUs", os.environ)


def join(timeout: timedelta) -> torch.device:
    """Joins the world that torchrun started, one rank a GPU; every wait of the group ends after `timeout`.

    More ranks than GPUs share them. The driver gives them the GPU by turns, so what a campaign checks is as on GPUs of
    their own, but for times, and with gloo as the library, since NCCL has no two ranks on a GPU. Nor can gloo be
    captured, and copies between such ranks need an SM (CONTRIBUTING.md).
    """
    need_gpus()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("this campaign needs ranks: python -m torch.distributed.run --standalone --nproc-per-node 2 -m ...")
    is_shared = sharers() > 1
    os.environ.update(SHARED_GPU if is_shared else {})
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store, rank, world_size = next(dist.rendezvous("env://"))
    store.set(f"started {rank}", "")
    store.wait([f"started {each}" for each in range(world_size)], START_UP)  # a short timeout is for calls alone
    backend, own = ("gloo", None) if is_shared else ("nccl", device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=own, timeout=timeout)
    return device


def sharers() -> int:
    """How many ranks a GPU has, at most."""
    return -(-int(os.environ["LOCAL_WORLD_SIZE"]) // torch.cuda.device_count())


def integers(*shape: int, seed: int) -> torch.Tensor:
    """-1, 0 and 1, so that every sum of products is exact; the same on every rank that names the same seed."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator, device=where).bfloat16()


def shard(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    parts = whole.chunk(dist.get_world_size())
    return parts[dist.get_rank()].contiguous() if dist.get_rank() < len(parts) else whole[:0]


class Report:
    """Prints a line per check, and what failed on each rank; `finish` ends the process with 1 if any check failed."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._failed = 0

    def all_agree(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return self.total(int(not holds)) == 0

    def total(self, count: int) -> int:
        """The sum over ranks."""
        sums = torch.tensor([count], device=self._device)
        dist.all_reduce(sums)
        return int(sums)

    def line(self, what: str, count: int, failures: list[str], started: float) -> None:
        """One check: how many cases, which failed on any rank, how long since `started`. Collective."""
        self._failed += len(failures)
        for failure in failures[:5]:
            print(f"    rank {dist.get_rank()}: {failure}", flush=True)
        failed = self.total(len(failures))
        if dist.get_rank() == 0:
            verdict = "ok" if not failed else f"{failed} FAILED"
            print(f"{what:60s} {count:6d} cases  {verdict:10s} {time.monotonic() - started:7.1f} s", flush=True)

    def run(self, checks: Iterable[Check]) -> int:
        """Runs checks, a line for each; how many cases have failed on this rank. Collective."""
        with progress("campaign", None, is_shown=dist.get_rank() == 0) as tell:
            for done, check in enumerate(checks):
                tell(check.name, done)
                started = time.monotonic()
                found = list(check.outcomes())
                self.line(check.name, check.cases or len(found), [each for each in found if each], started)
        return self._failed

    def finish(self) -> NoReturn:
        """Ends the process: 0 if every check held."""
        leave()
        sys.exit(int(self._failed > 0))


def leave() -> None:
    """Every rank ends its part of the world, behind all work."""
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


report = Report()


class Check(NamedTuple):
    """A line of a campaign. outcomes: what is wrong with each case on this rank; empty where nothing is. Collective.

    cases: how many there are, where a line of outcomes stands for more than one.
    """

    name: str
    outcomes: Callable[[], Iterable[str]]
    cases: int = 0


def arguments(text: str, deadline_s: float) -> argparse.ArgumentParser:
    """The options that every campaign has. deadline_s: how long whatever waits for a peer may wait, if not told."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks whose line contains this text")
    parser.add_argument("--deadline", type=float, default=deadline_s, help="seconds that a call may wait for its peers")
    return parser


def run_campaign(parser: argparse.ArgumentParser, checks: Callable[[argparse.Namespace], Iterable[Check]]) -> NoReturn:
    """Joins the world, runs the checks that are asked for, and ends the process: 0 if every check held."""
    asked = parser.parse_args()
    join(timedelta(seconds=asked.deadline))
    report.run(check for check in checks(asked) if asked.only in check.name)
    ow.check()
    report.finish()
