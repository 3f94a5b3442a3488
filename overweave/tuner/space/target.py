"""What a plan will run on, and the options that plans take there."""

from __future__ import annotations

import torch
from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.hardware.multicast import nccl_uses_it
from overweave.memory.cuda.multicast import has_multicast
from overweave.memory.cuda.peer_access import agreed_peer_access, has_peer_access
from overweave.memory.group import Group
from overweave.schedules.methods.record import Method


class Target(Struct, frozen=True):
    """What a plan will run on. is_hopper: sm_90. name: the GPU's, as its driver tells it; of no meaning on a CPU.
    peer_access: as of a Machine. has_multicast: NVLink multicast, which NCCL uses unless it is told not to.
    """

    kind: str
    sms: int = 132
    is_hopper: bool = True
    name: str = "NVIDIA H200"
    peer_access: bool = True
    has_multicast: bool = False

    def device(self, world_size: int) -> str:
        """What a measurement of so many ranks is made on. NCCL by NVLink multicast is another machine's."""
        if self.kind != "cuda":
            return self.kind
        return f"{self.name}, NVLink multicast" if self.has_multicast and nccl_uses_it(world_size) else self.name


def target_of(device: torch.device, group: Group | None = None) -> Target:
    """What a device means to the choice of a plan. With a group, what its ranks agree on: the first call of a group on
    a GPU is collective, and raises RankMismatch and PeerError."""
    if device.type == "cpu":
        return Target("cpu")
    properties = torch.cuda.get_device_properties(device)
    sms, is_hopper = properties.multi_processor_count, properties.major == 9
    reaches = has_peer_access(device) if group is None else agreed_peer_access(group, device)
    return Target("cuda", sms, is_hopper, properties.name, reaches, has_multicast(device))


def target_on(machine: Machine) -> Target:
    """A GPU of a described machine."""
    is_hopper = any(tile.kernel == "hopper" for tile in machine.tiles)
    return Target("cuda", machine.processor.sms, is_hopper, machine.title, machine.peer_access)


def tile_options(target: Target, method: Method) -> dict[str, str | int]:
    """Options that every plan of a method with a tile kernel takes on a target."""
    if target.kind == "cpu":
        return {}
    own: dict[str, str | int] = {"pieces": 1} if method.takes("pieces") else {}
    return {"kernel": "hopper" if target.is_hopper else "portable", "sms": target.sms, **own}
