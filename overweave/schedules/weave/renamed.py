"""A communication under other names, so that several can stand in one schedule."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.schedule import Collective, Notify, Operation, Region, SignalPad, Wait
from overweave.schedules.communication import Chunk, Communication


def renamed(made: Communication, prefix: str, buffers: dict[str, str], tensors: dict[str, str]) -> Communication:
    """The same communication with every name its own. Queues keep their names: they are shared."""
    names = _Names(prefix, buffers, tensors)
    return Communication(
        world_size=made.world_size,
        buffers=tuple(replace(buffer, name=names.buffer(buffer.name)) for buffer in made.buffers),
        pads=tuple(SignalPad(names.own(pad.name), pad.size) for pad in made.pads),
        queues=made.queues,
        given=tuple(replace(g, region=names.region(g.region), tensor=names.tensor(g.tensor)) for g in made.given),
        goal=tuple(replace(g, region=names.region(g.region), tensor=names.tensor(g.tensor)) for g in made.goal),
        steps=tuple(names.step(step) for step in made.steps),
    )


class _Names(Struct, frozen=True):
    prefix: str
    buffers: dict[str, str]
    tensors: dict[str, str]

    def own(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def buffer(self, name: str) -> str:
        return self.buffers.get(name, self.own(name))

    def tensor(self, name: str) -> str:
        return self.tensors.get(name, name)

    def region(self, region: Region) -> Region:
        return replace(region, buffer=self.buffer(region.buffer))

    def step(self, step: Operation | Chunk) -> Any:
        """Every field that holds regions, waits or notifies, whatever kind of step it is."""
        changed: dict[str, Any] = {"name": self.own(step.name)}
        if isinstance(step, Collective):
            changed["label"] = self.own(step.label)
        for field in step.__struct_fields__:
            value = getattr(step, field)
            if isinstance(value, Region):
                changed[field] = self.region(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Region | Wait | Notify):
                changed[field] = tuple(self._part(part) for part in value)
        return replace(step, **changed)

    def _part(self, part: Region | Wait | Notify) -> Region | Wait | Notify:
        return self.region(part) if isinstance(part, Region) else replace(part, pad=self.own(part.pad))
