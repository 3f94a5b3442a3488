"""NVLink multicast (NVLS): what tells the libraries of a process to go without it, and whether a process is told so.

No method of ours needs it. On shared hosts it can put the GPUs out of service; elsewhere NCCL is quicker by it, so that
times measured without it do not hold with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib.resources import files
from types import MappingProxyType

from overweave.errors import MachineError

FILE = "no_multicast.env"  # the Makefile reads it, too
_LINES = files("overweave.hardware").joinpath(FILE).read_text().splitlines()
WITHOUT: Mapping[str, str] = MappingProxyType(dict(line.split("=") for line in _LINES if not line.startswith("#")))
BY_NCCL, BY_TORCH = "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# SOURCE: ncclNvlsInit in src/transport/nvls.cc of NCCL 2.2x: groups of one or two GPUs go without.
FEWEST_RANKS = 3


def settings(environment: Mapping[str, str]) -> str:
    """What an environment says, by variable: `NAME=VALUE, NAME not set, ...`."""
    return ", ".join(f"{name}={environment[name]}" if name in environment else f"{name} not set" for name in WITHOUT)


def is_off(environment: Mapping[str, str]) -> bool:
    """Whether all libraries are told to go without."""
    return WITHOUT.items() <= environment.items()


def nccl_uses_it(world_size: int) -> bool:
    """Whether NCCL uses it for a group of this process, on GPUs that have it."""
    return world_size >= FEWEST_RANKS and os.environ.get(BY_NCCL) != WITHOUT[BY_NCCL]


def completed(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process is told that one with this environment starts: everything, where one library is to go without."""
    return dict(WITHOUT) if WITHOUT.items() & environment.items() else {}


def switch_off(environment: MutableMapping[str, str]) -> None:
    """Tells the libraries to go without, where the environment does not say otherwise."""
    for name, value in WITHOUT.items():
        environment.setdefault(name, value)


def need_off(asked: str, environment: Mapping[str, str]) -> None:
    """Raises MachineError where a library is not told to go without."""
    if not is_off(environment):
        cure = f"Set {' '.join(f'{name}={value}' for name, value in WITHOUT.items())}"
        raise MachineError(asked, f"NVLink multicast is not switched off: {settings(environment)}", cure)
