"""Sums over slots: the op, its gradient, and its kernel under the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from overweave.moe.slots import ordered_sum
from tests.source_tree import ROOT, python_path


def test_what_is_not_there_is_not_added():
    parts = torch.tensor([[[1.0, 2.0], [float("nan"), 4.0]], [[5.0, 6.0], [7.0, 8.0]]]).requires_grad_()
    there = torch.tensor([[True, False], [True, True]])
    y = ordered_sum(parts, there)
    assert torch.equal(y, torch.tensor([[1.0, 2.0], [12.0, 14.0]]))
    y.sum().backward()
    assert torch.equal(parts.grad, there[..., None].expand(-1, -1, 2).float())  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_kernel_adds_the_same():
    command = [sys.executable, "-m", "tests.moe.interpreted_slots"]
    environment = {"PYTHONPATH": python_path(), "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0 wrong\n", done.stderr
