"""What is tried with whatever ranks call together on GPUs: many calls, replays of a graph, an absent rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.exact.calls import Case, Inputs, captured, device, expected, make_inputs, results
from overweave.errors import PeerError

Tensors = tuple[Any, ...]  # None where there is none
LATE_S = 1.5  # behind its deadline a wait has ended, and the host has heard of it
AHEAD = 6  # calls, with tensors at other places, for which graphs are made, and at the same
SETS, SHORTEST_CYCLES, LONGEST_CYCLES = 8, 10_000, 500_000


class Trial(NamedTuple):
    """Something that ranks call. inputs: this rank's, from a seed. exact: what plain torch makes of them. tolerance:
    absolute.
    """

    name: str
    inputs: Callable[[int], Tensors]
    run: Callable[[Tensors], torch.Tensor]
    exact: Callable[[int, Tensors], torch.Tensor]
    tolerance: float = 0.0

    def differs(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Whether a result is wrong, on the device."""
        assert found.shape == wanted.shape, self.name
        return ~((found.float() - wanted.float()).abs() <= self.tolerance).all()


def of_case(case: Case) -> Trial:
    """A call of an operator, on integers whose every sum is exact."""

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        return expected(case, Inputs(*given), torch.float32).to(case.out_dtype)

    def run(given: Tensors) -> torch.Tensor:
        return results(case, Inputs(*given))[0]

    return Trial(case.name, lambda seed: make_inputs(case, seed, exact=True), run, exact)


def long_run(trial: Trial, calls: int, is_replayed: bool, longest: int = LONGEST_CYCLES) -> list[str]:
    """What is wrong with so many calls: new inputs every time, one rank late by up to `longest` cycles, eager or as
    replays of a graph.
    """
    sets = [trial.inputs(seed) for seed in range(1, SETS + 1)]
    wanted = [trial.exact(seed, given) for seed, given in enumerate(sets, 1)]
    chance, rank = random.Random(7), dist.get_rank()
    differing = torch.zeros((), dtype=torch.int64, device=device())
    static = copied(sets[0])
    call: Callable[[], torch.Tensor] = partial(trial.run, static)
    if is_replayed:
        replay = captured(lambda: (trial.run(static),))
        call = lambda: replay()[0]  # noqa: E731
    for _ in range(calls):
        index, late = chance.randrange(SETS), chance.randrange(4 * dist.get_world_size())
        cycles = chance.randint(SHORTEST_CYCLES, longest)
        for place, data in zip(static, sets[index], strict=True):
            if place is not None:
                place.copy_(data)
        if rank == late:
            torch.cuda._sleep(cycles)
        differing += trial.differs(call(), wanted[index])
    torch.cuda.synchronize()
    return [f"{int(differing)} differ"] if differing else []


def copied(given: Tensors) -> Tensors:
    """The same numbers at other places."""
    return tuple(None if each is None else each.clone() for each in given)


def is_at_fault() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def absent_rank(trial: Trial, limit_s: float) -> list[str]:
    """What is wrong with calls in which the last rank does not take part, several ahead, and behind the reset."""

    def calls(given: Tensors) -> list[str]:
        if not is_at_fault():
            places = given, copied(given)
            return survive(trial.name, partial(_several, trial, places), limit_s)
        time.sleep(limit_s)
        return []

    return computes_again(trial, calls)


def _several(trial: Trial, places: tuple[Tensors, Tensors]) -> torch.Tensor:
    for call in range(AHEAD):
        out = trial.run(places[call % 3 % 2])  # each result makes way for the next, which may lie where it did
    return out


def computes_again(trial: Trial, calls: Callable[[Tensors], list[str]]) -> list[str]:
    """What is wrong with these calls, between others that all ranks make as they should."""
    given = trial.inputs(2)
    wanted = trial.exact(2, given)
    trial.run(given)
    torch.cuda.synchronize()
    dist.barrier()
    failures = calls(given)
    ow.reset()
    if trial.differs(trial.run(given), wanted):
        failures.append(f"{trial.name}: wrong result behind the reset")
    return failures


def survive(name: str, calls: Callable[[], torch.Tensor], limit_s: float) -> list[str]:
    """What is wrong with calls that must raise within `limit_s`, and name who is late."""
    started = time.monotonic()
    try:
        out = calls()
        ow.check()
    except PeerError as error:
        took_s = time.monotonic() - started
        named = "late" in str(error) or "waits" in str(error)
        return [] if took_s <= limit_s and named else [f"{name}: {took_s:.1f} s, {error}"]
    return [f"{name}: no error; NaN: {bool(out.isnan().any())}"]
