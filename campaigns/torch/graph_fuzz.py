"""Are gradients of compiled programs right, whatever their graphs hold, from a cold cache of graphs and a warm one?

    python -m campaigns.graph_fuzz [--count 500] [--seed 0] [--worlds 2 4] [--batch 20]

Random programs of linear layers, norms, slices, sums, checkpoints of all kinds, and collectives: torch's functional
ones, its fused symmetric-memory operators, and ours (graph_programs.py). Each is compiled by Inductor with overweave's
pass (`install(graphs=True)`), in processes that share a new cache, and again in other processes that load its graphs
from there. Results and gradients of every rank are held against the same program in torch's own operations, eagerly.
Kernels that Inductor would write are left to ATen: no compiler of C++ runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config

import overweave as ow
from campaigns.shown import shown
from campaigns.torch.graph_programs import Given, Program, given_to, program, result
from overweave.runtime.host.processes import RanksFailed, run_ranks

TOLERANCE, ROUNDINGS, DEADLINE_S, GROUP_DEADLINE_S = 2e-4, 8.0, 60.0, 20.0
WARM = "warm"


class Told(NamedTuple):
    """Of a program on a rank: what is wrong, if anything, how many graphs came from the cache, and whether eager torch
    computes it: that of 2.10 and 2.11 refuses to gather a tensor whose rows do not follow one another."""

    wrong: str
    loaded: int
    is_computed: bool = True


def values(one: Program, given: Given, is_compiled: bool) -> list[torch.Tensor]:
    """The result of a program, and its gradients."""
    function: Any = torch.compile(result, dynamic=False) if is_compiled else result
    y = function(one, given)
    y.backward()
    return [y.detach(), *(torch.zeros(()) if each.grad is None else each.grad for each in given.factors)]


def in_double(given: Given) -> Given:
    """The same numbers, in fp64."""
    x, *ws, bias = (each.detach().double().requires_grad_() for each in given.factors)
    return given._replace(x=x, ws=ws, bias=bias)


def difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> str:
    """Where values are others than they should be: further from eager ones than rounding leaves them from exact ones.

    Rounding grows in a program with a large gradient: what is allowed is a share of the largest value, or, where that
    is more, some times as far as eager fp32 is from fp64.
    """
    names = ["result", "gradient of x", *(f"gradient of w{index}" for index in range(3)), "gradient of the bias"]
    for name, one, other, true in zip(names, found, wanted, exact, strict=True):
        most = float(other.abs().max().clamp_min(1e-3))
        allowed = max(TOLERANCE * most, ROUNDINGS * float((other - true).abs().max()))
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=allowed):
            return f"{name}: off by {float((one - other).abs().max()) / most:.2g} of the largest"
    return ""


def judged(seeds: list[int], folder: str) -> list[Told]:
    """For `run_ranks`: programs in order, up to the first that raises, behind which ranks have nothing in common."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for its functional collectives
    logging.getLogger("torch").setLevel(logging.ERROR)  # it warns of what selective checkpoints must not hold
    told: list[Told] = []
    ow.install(graphs=True)
    with config.patch(fallback_by_default=True, compile_threads=1):
        for seed in seeds:
            one = program(seed)
            torch._dynamo.reset()
            counters.clear()
            has_ended = is_computed = False
            try:
                wanted = values(one, given_to(one), is_compiled=False)
                is_computed = True
                exact = values(one, in_double(given_to(one)), is_compiled=False)
                found = values(one, given_to(one)._replace(is_ours=True), is_compiled=True)
                wrong = difference(found, wanted, exact)
            except Exception as error:  # noqa: BLE001 - whatever it is, torch computes
                wrong = f"{type(error).__name__}: {error}"[:400]
                has_ended = True
            told.append(Told(wrong, counters["inductor"]["fxgraph_cache_hit"], is_computed))
            if has_ended:
                break
        if not any(each.wrong for each in told):
            dist.barrier()  # before a rank ends
    return told


def batches(seeds: range, size: int) -> Iterator[list[int]]:
    """The seeds, so many at a time."""
    for first in range(0, len(seeds), size):
        yield list(seeds[first : first + size])


def ran(seeds: list[int], world_size: int, folder: str) -> list[list[Told]]:
    """By program what each rank tells. Behind one that raised, the others run in new processes."""
    found: list[list[Told]] = []
    while len(found) < len(seeds):
        rest = seeds[len(found) :]
        try:
            limit_s = DEADLINE_S * (1 + len(rest))
            by_rank = run_ranks(judged, world_size, rest, folder, timeout_s=limit_s, group_timeout_s=GROUP_DEADLINE_S)
        except RanksFailed as error:
            found.append([Told(f"all: {error}"[:400], 0)])
            continue
        done = min(len(told) for told in by_rank)
        found += [[Told(*told[index]) for told in by_rank] for index in range(done)]
    return found


def failures(seeds: list[int], world_size: int, folder: str) -> Iterator[str]:
    """What is wrong with programs whose graphs are new, and with the same again, whose graphs are loaded."""
    for state in ("cold", WARM):
        for seed, told in zip(seeds, ran(seeds, world_size, folder), strict=True):
            if not any(each.is_computed for each in told):
                print(f"{world_size} ranks, {state}, left out, for eager torch says: {program(seed)}: {told[0].wrong}")
                continue
            wrong = [f"rank {rank}: {each.wrong}" for rank, each in enumerate(told) if each.wrong]
            if wrong:
                yield f"{world_size} ranks, {state}, {program(seed)}: {'; '.join(wrong)}"
            elif state == WARM and not all(each.loaded for each in told):
                yield f"{world_size} ranks, {program(seed)}: no graph of it was loaded"


def load_compiler() -> None:
    """Imports what ranks will compile with, so that forked ones have it.

    Not where torch is built for CUDA: its autograd starts threads, for each device, that a forked process lacks.
    """
    if torch.version.cuda is not None:
        return
    with config.patch(fallback_by_default=True, compile_threads=1, force_disable_caches=True):
        compiled: Any = torch.compile(torch.nn.functional.linear, dynamic=False)
        compiled(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
    torch._dynamo.reset()


def main(words: Sequence[str] | None = None) -> int:
    """Prints what is wrong, and how many programs ran; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=20, help="programs of one set of processes")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    seeds = range(asked.seed, asked.seed + asked.count)
    batch_count, found, ended = -(-asked.count // asked.batch), 0, 0
    load_compiler()
    of_batches = shown(batches(seeds, asked.batch), "batches of programs", batch_count, lambda batch: str(batch[0]))
    for turn, batch in enumerate(of_batches):
        with tempfile.TemporaryDirectory() as folder:
            for failure in failures(batch, asked.worlds[turn % len(asked.worlds)], folder):
                found += 1
                print(failure, flush=True)
        ended += len(batch)
    print(f"{ended} programs, each from a cold cache and a warm one: {found or 'none'} wrong", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
