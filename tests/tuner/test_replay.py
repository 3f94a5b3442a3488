from __future__ import annotations

import pytest
import torch

from overweave.tuner.replay import REPLAYED_ROWS, is_replayed
from overweave.tuner.sides import Setting


@pytest.mark.parametrize(
    ("device", "rows", "wanted"),
    [("cuda", 1, True), ("cuda", REPLAYED_ROWS, True), ("cuda", REPLAYED_ROWS + 1, False), ("cpu", 1, False)],
)
def test_decoding_sizes_are_replayed_on_gpus(device: str, rows: int, wanted: bool):
    setting = Setting(None, torch.device(device), torch.bfloat16, None)  # type: ignore[arg-type]
    assert is_replayed(setting, rows) == wanted
