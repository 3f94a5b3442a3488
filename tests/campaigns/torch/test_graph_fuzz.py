"""Random programs compiled with the pass, cold and from a cache of graphs: the shortest of those that run at night."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.torch.graph_fuzz import failures, load_compiler
from campaigns.torch.graph_programs import CHECKPOINTS, STEPS, program

COUNT, DRAWN = 6, 100
ONCE_WRONG = (103,)  # a sum in place of a bias that a saved product had yet to read


def steps(seed: int) -> int:
    return sum(len(words) for _, _, words in program(seed).blocks)


def test_programs_hold_every_step_and_every_checkpoint():
    blocks = [block for seed in range(DRAWN) for block in program(seed).blocks]
    assert {step for _, _, words in blocks for step in words} == {*STEPS}
    assert {kind for kind, _, _ in blocks} == {*CHECKPOINTS}


@pytest.mark.slow
def test_gradients_of_compiled_programs_are_those_of_torch(tmp_path: Path):
    load_compiler()
    seeds = [*sorted(range(DRAWN), key=steps)[:COUNT], *ONCE_WRONG]
    assert not list(failures(seeds, 2, str(tmp_path)))
