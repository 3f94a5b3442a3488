"""NVLink multicast (NVLS): the environment variables that switch it off, and whether they are set.

No method of ours needs it. On shared hosts it can put the GPUs out of service; elsewhere NCCL is faster with it, so
times measured without it do not hold with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib.resources import files
from types import MappingProxyType

from overweave.errors import MachineError

FILE = "no_multicast.env"  # also read by the Makefile
_LINES = files("overweave.hardware").joinpath(FILE).read_text().splitlines()
WITHOUT: Mapping[str, str] = MappingProxyType(dict(line.split("=") for line in _LINES if not line.startswith("#")))
BY_NCCL, BY_TORCH = "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# SOURCE: ncclNvlsInit in src/transport/nvls.cc of NCCL 2.2x: groups of one or two GPUs go without.
FEWEST_RANKS = 3


def settings(environment: Mapping[str, str]) -> str:
    """Return the variables of an environment as text: `NAME=VALUE, NAME not set, ...`."""
    return ", ".join(f"{name}={environment[name]}" if name in environment else f"{name} not set" for name in WITHOUT)


def is_off(environment: Mapping[str, str]) -> bool:
    """Whether an environment switches multicast off for all libraries."""
    return WITHOUT.items() <= environment.items()


def nccl_uses_it(world_size: int) -> bool:
    """Whether NCCL uses multicast for a group of this process, on GPUs that have it."""
    return world_size >= FEWEST_RANKS and os.environ.get(BY_NCCL) != WITHOUT[BY_NCCL]


def settings_for_child(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a child process: all of them if the environment has one of them, else none."""
    return dict(WITHOUT) if WITHOUT.items() & environment.items() else {}


def switch_off(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the environment does not set itself."""
    for name, value in WITHOUT.items():
        environment.setdefault(name, value)


def require_off(asked: str, environment: Mapping[str, str]) -> None:
    """Raise MachineError if an environment does not switch multicast off."""
    if not is_off(environment):
        cure = f"Set {' '.join(f'{name}={value}' for name, value in WITHOUT.items())}"
        raise MachineError(asked, f"NVLink multicast is not switched off: {settings(environment)}", cure)
