"""A cache of tile programs that compute by torch: the first call verifies and builds one, and loads its kernels."""

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


class ProgramSpec(Hashable, Protocol):
    """The description of a program, and the key by which it is cached: equal ones share a program."""

    def declared(self) -> Declared:
        """Return the symmetric buffers and channels."""

    def schedule(self) -> Schedule | None:
        """Return the Schedule to verify before the program runs; None if nothing moves."""


class Kernels(NamedTuple):
    """Loads the kernels of a call, by computing on zeroed buffers. key: equal for calls of the same kernels."""

    key: Hashable
    load: Callable[[OwnBuffer], object]


class _Built(NamedTuple):
    program: TileProgram
    loaded: set[Hashable]


_BUILT: dict[dist.ProcessGroup, dict[tuple[ProgramSpec, torch.device], _Built]] = {}
atexit.register(_BUILT.clear)  # a process group must not outlive the interpreter


def proven_program(
    group: Group, spec: ProgramSpec, device: torch.device, kernels: Kernels | None = None, has_kernels: bool = False
) -> TileProgram:
    """Return the program that `spec` describes; the first call of a group verifies and builds it, collectively.

    kernels: loaded on a GPU before the first call, since loading one may block behind kernels that wait for peers.
    has_kernels: as of a TileProgram. Raises ScheduleRefused if it cannot be verified, RankMismatch if ranks differ.
    """
    for closed in [each for each in _BUILT if each not in LIVE_GROUPS]:
        del _BUILT[closed]
    programs = _BUILT.setdefault(group.process_group, {})
    if (spec, device) not in programs:
        if len(programs) >= MOST_PROGRAMS:
            programs.pop(next(iter(programs)))
        schedule, declared = spec.schedule(), spec.declared()
        if schedule is not None:
            verify_schedule(schedule).raise_if_refused()
        program = TileProgram(declared.buffers, declared.channels, group.process_group, device, has_kernels)
        programs[spec, device] = _Built(program, set())
    built = programs[spec, device]
    if kernels is None or device.type != "cuda" or kernels.key in built.loaded:
        return built.program
    if not torch.cuda.is_current_stream_capturing():
        own = {
            name: torch.zeros(each.rows, each.cols, dtype=each.dtype, device=device)
            for name, each in spec.declared().buffers.items()
        }
        kernels.load(own.__getitem__)
        torch.cuda.synchronize(device)
        built.loaded.add(kernels.key)
    return built.program
