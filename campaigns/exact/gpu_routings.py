"""All-to-alls on GPUs, whatever ranks send each other: are all bits right?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_routings [--calls 200]

Calls as of campaigns/exact/routings.py, in bf16: uneven and empty blocks in plans of copies and library matmuls, equal
ones in every plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from campaigns.exact.routings import Routing, outcome, routings
from campaigns.gpu_ranks import Check, arguments, run_campaign


def checks(asked: argparse.Namespace) -> Iterable[Check]:
    """One line for each seed."""
    for seed in range(asked.seeds):
        cases = list(routings(asked.calls, seed, dist.get_world_size(), (torch.bfloat16,)))
        yield Check(f"random counts, seed {seed}", partial(tried, cases))


def tried(cases: Iterable[Routing]) -> Iterable[str]:
    """What is wrong with each call on this rank."""
    return (outcome(case, "cuda") for case in cases)


if __name__ == "__main__":
    parser = arguments(str(__doc__), deadline_s=60.0)
    parser.add_argument("--calls", type=int, default=100, help="of each seed")
    parser.add_argument("--seeds", type=int, default=2)
    run_campaign(parser, checks)
