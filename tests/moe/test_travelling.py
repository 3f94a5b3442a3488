"""Metadata of tokens that travel: rows as words and back, and its kernels under the interpreter."""

from __future__ import annotations

import pytest
import torch

from overweave.moe.travelling import Travelling, as_rows, as_words
from tests import forked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_rows_come_back_of_words(dtype: torch.dtype):
    whole = torch.arange(60).to(torch.uint8).view(5, 12).float().to(dtype)
    for rows in (whole, whole[:, 1:6], whole[2:], whole[:0]):
        words = as_words(rows)
        assert words.shape[1] % 4 == 0
        assert words.data_ptr() % 16 == 0
        assert torch.equal(as_rows(words, rows).float(), rows.float())


def test_a_token_goes_once_to_each_rank():
    ids = torch.tensor([[0, 1, 5], [5, 5, 2], [-1, 3, 0], [9, 4, 4]])
    targets, metadata = Travelling(torch.ones(4, 2), None, None, ids).targets_and_metadata(6, 3)
    assert targets.tolist() == [[0, -1, 2], [2, -1, 1], [-1, 1, 0], [3, 2, -1]]
    assert metadata[:3, :3].tolist() == [[1, 2, 6], [6, 6, 3], [0, 4, 1]]


@pytest.mark.slow
def test_kernels_make_the_same():
    done = forked.run("-m", "tests.moe.interpreted_travelling")
    assert done.stdout == "0 wrong\n", done.stdout + done.stderr
