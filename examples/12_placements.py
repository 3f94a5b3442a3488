"""Placements that a compiler chose, as plans: what travels, by three paths, proven and simulated.

python examples/12_placements.py
"""

from __future__ import annotations

from overweave import lower
from overweave.hardware.machine import load
from overweave.sim.simulate import total_us

MATMUL = lower.Matmul(8192, 8192, 8192)
CASES = {
    "rows gathered, as DTensor says it": ({"x": "Shard(0)", "w": "Shard(1)"}, "Shard(1)", 4),
    "parts summed, as Alpa says it": ({"x": "RS0", "w": "S0R"}, "RR", 4),
    "on two mesh dimensions, as GSPMD does": (
        {"x": "{devices=[2,1,2]<=[4] last_tile_dim_replicate}", "w": "{devices=[1,4]<=[4]}"},
        "{devices=[2,2]<=[4]}",
        (2, 2),
    ),
}


def main() -> None:
    machine = load("h200x4")
    for name, (inputs, outputs, mesh) in CASES.items():
        print(name)
        for path in ("direct", "template", "synth"):
            lowered = lower.placements(MATMUL, inputs=inputs, outputs=outputs, mesh=mesh, path=path)
            steps = "; ".join(map(str, lowered.steps))
            print(f"  {path:8s} {total_us(lowered.plan, machine):7.1f} us, step by step: {steps}")
            if lowered.fused is not None and lowered.words is not None:
                print(f"  {'':8s} {total_us(lowered.fused, machine):7.1f} us as {' plan='.join(lowered.words)}")


if __name__ == "__main__":
    main()
