"""What a module of a plan costs the host, beside what it costs in another checkout of overweave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TURNS = 3
HERE = Path(__file__).parents[2]
Cost = list[float]  # functions of Python, functions of C, us


def print_styles(beside: str, calls: int) -> None:
    """A line for each pass; beside another checkout, the least of several turns of both, and their ratios."""
    folders = [str(HERE), *([beside] if beside else [])]
    turns = [{folder: _asked(folder, calls) for folder in folders} for _ in range(TURNS if beside else 1)]
    least = {
        folder: {
            name: [min(each) for each in zip(*(turn[folder][name] for turn in turns), strict=True)] for name in known
        }
        for folder, known in turns[0].items()
    }
    for name, (calls, builtin, us) in least[str(HERE)].items():
        line = f"{calls:5.0f} calls {builtin:5.0f} C {us:7.1f} us  {name}"
        if beside:
            others, _, other_us = least[beside][name]
            line += f", beside {others:.0f} calls, {other_us:.1f} us"
            line += f": {calls / others:.3f} of its calls, {us / other_us:.3f} of its time"
        print(line)


def _asked(folder: str, calls: int) -> dict[str, Cost]:
    """The costs of a checkout, in a process of its own."""
    command = [sys.executable, "-P", str(HERE / "campaigns" / "host" / "host_styles.py"), str(calls)]
    environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Cost] = json.loads(answer.stdout.splitlines()[-1])
    return found
