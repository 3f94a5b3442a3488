"""Whether the table of a tile kernel stores each product where its Compute says."""

from __future__ import annotations

from overweave.ir.schedule import Compute, Operation
from overweave.ir.tile_order import TileRow, place_of_result
from overweave.ir.verify.verdict import Findings
from overweave.ir.words import MOST_PEERS


def check_stored(operation: Operation, rows: list[TileRow], world_size: int, findings: Findings) -> None:
    """Only a Compute stores at peers: at one rank, or, a sum of one addend, at every rank."""
    if not isinstance(operation, Compute):
        if any(row.to for row in rows):
            findings.add("lowering", operation, "a tile stores at a peer, but multiplies nothing")
        return
    to = place_of_result(operation, world_size) if operation.out else 0
    if to is None or (to < 0 and len(operation.addends) != 1):
        said = "tiles store a product at one rank, a sum of one addend at one or at every rank"
        findings.add("lowering", operation, f"{said}, not at {sorted(operation.stored_at)}")
    elif to and world_size - 1 > MOST_PEERS:
        findings.add("lowering", operation, f"tiles store at {MOST_PEERS} peers at most, not at {world_size - 1}")
    elif to > 0 and any(row.weight or row.into for row in rows):
        findings.add("lowering", operation, "a tile stores at a peer what is not its kernel's first output")
    elif any(row.to != to for row in rows):
        findings.add("lowering", operation, "a tile stores its result at another rank")
