"""`explain`: the plan and its reasons, without a group, and typed errors for what is no problem."""

from __future__ import annotations

import pytest
import torch

import overweave as ow
from overweave.errors import InputError

SIZES = {"m": 8192, "n": 3584, "k": 4096, "world_size": 4}


def test_it_says_what_runs_on_a_cpu():
    choice = ow.explain("all_gather_matmul", **SIZES, device="cpu")
    assert str(choice).startswith("all_gather_matmul.push runs, because ")
    assert str(choice).splitlines()[1] == "A rule decided: nothing was measured or simulated."
    assert "emulated" in str(choice)
    assert "torch's fused operators need CUDA" in str(choice)


def test_what_cannot_be_is_not_marked_as_taken():
    choice = ow.explain("all_gather_matmul", **{**SIZES, "m": 256}, device="cpu")
    kept_back = [line for line in str(choice).splitlines() if "not: pieces=" in line]
    assert kept_back
    assert not [line for line in kept_back if "->" in line]


@pytest.mark.slow
def test_what_keeps_some_of_a_schedules_options_back_is_told_of_these():
    """Both ways of gather_packed are there for few rows, for more the one without a matmul of its own."""
    lines = str(ow.explain("all_gather_matmul", m=128, n=4096, k=4096, world_size=4)).splitlines()
    told = {line.strip(" ->").partition("  ")[0]: line for line in lines if "gather_packed" in line}
    assert "predicted" in told["gather_packed"]
    assert "not: the matmul of few rows" in told["gather_packed matmul=skinny|early"]


@pytest.mark.slow
def test_it_says_why_a_kernel_is_not_taken():
    choice = ow.explain("matmul_reduce_scatter", **{**SIZES, "n": 3583})
    assert "scatter" not in choice.text
    kernels = ("scatter", "scatter_stored", "ring_stored", "fused_ring", "scatter_pull", "scatter_packed")
    kernels += ("islands", "synth")
    assert str(choice).count("not: n=3583 and k=4096 must be multiples of 8") == len(kernels)
    assert "fp32" in str(ow.explain("all_gather_matmul", **SIZES, dtype=torch.float32))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"operator": "matmul"}, "there is no such operator"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"device": "nowhere"}, "there is no such device"),
        ({"device": "meta"}, "does not run there"),
        ({"m": -1}, "m=-1"),
        ({"n": 0}, "n=0"),
        ({"n": []}, "n=[]"),
        ({"n": 16.0}, "n=16.0"),
        ({"m": "many"}, "m=many"),
        ({"operator": "matmul_all_reduce", "n": (64, 64)}, "takes one"),
        ({"n": (64, 40), "dtype": torch.float8_e4m3fn}, "n=40"),
        ({"n": 40, "dtype": torch.float8_e4m3fn}, "n=40"),
        ({"k": 0}, "k=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 5000}, "world_size 5000"),
        ({"m": 1 << 31}, "more than 31 bits"),
        ({"n": 1 << 40}, "more than 31 bits"),
        ({"k": 1 << 62}, "more than 31 bits"),
    ],
)
def test_what_is_no_problem_is_refused(changes: dict[str, object], found: str):
    with pytest.raises(InputError) as caught:
        ow.explain(**{"operator": "all_gather_matmul", **SIZES, **changes})
    assert found in str(caught.value)


def test_a_dtype_may_be_a_word():
    told = {str(ow.explain("all_gather_matmul", **SIZES, dtype=word)) for word in (torch.float16, "float16", "fp16")}
    assert len(told) == 1
    with pytest.raises(InputError, match="dtype float15"):
        ow.explain("all_gather_matmul", **SIZES, dtype="float15")


def test_a_plan_that_is_slower_than_the_library_path_is_not_said_to_gain_too_little():
    ragged = ow.explain("all_gather_matmul", **(SIZES | {"m": 1001, "n": 1001, "k": 1024}))
    assert ragged.plan == "all_gather_matmul.sequential"
    assert "which is slower" in str(ragged)
