"""New matrices: where they are asked for, and on the quick way where that is the current GPU."""

from __future__ import annotations

import pytest
import torch

from overweave.memory import outside_modes
from overweave.memory.outside_modes import empty_factory

CPU = torch.device("cpu")


def test_results_are_made_where_x_lies_on_the_quick_way_where_it_is_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(outside_modes, "empty_strided_cuda", lambda *given: made.append(given))
    monkeypatch.setattr(outside_modes, "cuda_getDevice", lambda: 1)
    here, there = (empty_factory(torch.device("cuda", index)) for index in (1, 2))
    here((3, 5), torch.float16)
    assert made == [((3, 5), (5, 1), torch.float16)]
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: (shape, dtype, device))
    assert there((3, 5), torch.float16) == ((3, 5), torch.float16, torch.device("cuda", 2))
    assert empty_factory(CPU)((3, 5), torch.float16) == ((3, 5), torch.float16, CPU)
    assert len(made) == 1
