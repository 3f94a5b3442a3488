"""Tile programs whose work is torch's, built when a signature is first called: proven on paper, and their kernels
loaded before anything waits for them.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from overweave.ir.schedule import Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.memory.group import LIVE_GROUPS, Group
from overweave.ops.author.tile_program import TileProgram
from overweave.runtime.handwritten import Declared, OwnBuffer

MOST_PROGRAMS = 64  # of one group; each leases symmetric memory


class Paper(Hashable, Protocol):
    """All that a program follows from; equal ones are one program."""

    def declared(self) -> Declared:
        """What peers address."""

    def schedule(self) -> Schedule | None:
        """What is proven before it runs; None where nothing moves."""


class Kernels(NamedTuple):
    """What loads the kernels of a call: it computes on any symmetric buffers. key: what decides which kernels."""

    key: Hashable
    load: Callable[[OwnBuffer], object]


class _Built(NamedTuple):
    program: TileProgram
    loaded: set[Hashable]


_BUILT: dict[dist.ProcessGroup, dict[tuple[Paper, torch.device], _Built]] = {}
atexit.register(_BUILT.clear)  # a process group must not outlive the interpreter


def proven_program(
    group: Group, paper: Paper, device: torch.device, kernels: Kernels | None = None, has_kernels: bool = False
) -> TileProgram:
    """The program of a paper, built collectively. kernels: of torch's work; on a GPU, loading one may wait for others
    that wait for peers, so that all are loaded before the first call. has_kernels: as of a TileProgram. Raises
    ScheduleRefused, and RankMismatch where ranks differ."""
    for gone in [each for each in _BUILT if each not in LIVE_GROUPS]:
        del _BUILT[gone]
    known = _BUILT.setdefault(group.process_group, {})
    if (paper, device) not in known:
        if len(known) >= MOST_PROGRAMS:
            known.pop(next(iter(known)))
        schedule, declared = paper.schedule(), paper.declared()
        if schedule is not None:
            verify_schedule(schedule).raise_if_refused()
        program = TileProgram(declared.buffers, declared.channels, group.process_group, device, has_kernels)
        known[paper, device] = _Built(program, set())
    built = known[paper, device]
    if kernels is None or device.type != "cuda" or kernels.key in built.loaded:
        return built.program
    if not torch.cuda.is_current_stream_capturing():
        own = {
            name: torch.zeros(each.rows, each.cols, dtype=each.dtype, device=device)
            for name, each in paper.declared().buffers.items()
        }
        kernels.load(own.__getitem__)
        torch.cuda.synchronize(device)
        built.loaded.add(kernels.key)
    return built.program
