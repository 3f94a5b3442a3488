"""`overweave explain`: a plan and its reasons for the global shape."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cli.called import called
from tests.source_tree import ROOT

run = partial(called, "explain")


@pytest.mark.slow
def test_overlap_where_it_pays_and_the_library_where_it_does_not():
    assert run("all_gather_matmul", "--shape", "8192,14336,4096").startswith("all_gather_matmul.push")
    assert run("matmul_reduce_scatter", "--shape", "64,4096,4096").startswith("matmul_reduce_scatter.scatter_packed")
    small = run("matmul_all_to_all", "--shape", "2048,2048,1536")
    assert small.startswith("matmul_all_to_all.sequential")
    assert "per_peer order=all_peers" in small


def test_the_shape_is_the_global_one():
    # k of one rank is 4100, which is no multiple of 8; the global k is one.
    assert "k=4100 must be multiples of 8" in run("matmul_reduce_scatter", "--shape", "8192,8192,8200", "--world", "2")


def test_sizes_that_ranks_do_not_divide_are_explained_as_they_are_tuned():
    shown = run("all_gather_matmul", "--shape", "8192,14340+1021,4096", "-w", "4")
    assert "n=1021 does not divide by 4 ranks: each is taken to have 256" in shown
    assert "n=3585+256 and k=4096 must be multiples of 8" in shown
    assert "does not divide" not in run("all_gather_matmul", "--shape", "8192,14340+1024,4096", "-w", "4")


@pytest.mark.slow
def test_a_call_of_no_rows_has_no_overlap():
    assert "there are no rows" in run("all_gather_matmul", "--shape", "0,64,64")


def test_a_call_that_ends_with_a_norm():
    normed = run("matmul_all_reduce", "--shape", "512,8192,8192", "--norm")
    assert normed.startswith("matmul_all_reduce.two_shot_packed")
    run("all_gather_matmul", "--shape", "2048,8192,8192", "--norm", exit_code=2)


def test_two_endings_are_not_one():
    assert "behind --after" in run("matmul_all_reduce", "--shape", "8,64,64", "--norm", "--after", "bias", exit_code=2)


def test_a_shape_that_is_none_is_told_as_it_was_given():
    assert "'8,64+,64'" in run("all_gather_matmul", "--shape", "8,64+,64", exit_code=2)


@pytest.mark.slow
def test_single_precision_is_the_librarys():
    assert "fp32" in run("all_gather_matmul", "--shape", "8192,14336,4096", "--dtype", "fp32")


@pytest.mark.slow
def test_eight_bits_and_several_weights():
    one = run("all_gather_matmul", "--shape", "8192,4096,4096")
    several, eight = (
        run("all_gather_matmul", "--shape", "8192,4096+1024+1024,4096"),
        run("all_gather_matmul", "--shape", "8192,4096,4096", "--dtype", "fp8"),
    )
    assert len({one, several, eight}) == 3
    assert "predicted" in several
    assert "torch's operators do no scaled by rows" in eight


@pytest.mark.parametrize(
    "words",
    [
        ("matmul", "--shape", "8,8,8"),
        ("all_gather_matmul", "--shape", "8,0,8", "-w", "2"),
        ("all_gather_matmul", "--shape", "8,8+,8", "-w", "2"),
        ("matmul_reduce_scatter", "--shape", "8,8+8,8", "-w", "2"),
        ("matmul_reduce_scatter", "--shape", "64,24,64", "--dtype", "fp8"),
        ("all_gather_matmul", "--shape", "64,96+64,64", "--dtype", "fp8"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...]):
    run(*words, exit_code=2)


KERNEL = f"{ROOT}/examples/kernels/matmul.py:matmul_kernel"
NUMBERS = "M=2048,N=512,K=512,BLOCK_M=128,BLOCK_N=128"


@pytest.mark.slow
def test_the_schedules_of_a_kernel_and_why_others_cannot_be():
    shown = run(KERNEL, "--schedule", "A:all_gather.auto", "--numbers", NUMBERS, "--world", "2")
    (taken, source, *ways) = shown.splitlines()
    assert taken.startswith("A=all_gather.")
    assert "simulated" in source
    (marked,) = (way for way in ways if "->" in way)
    assert taken.partition(" runs.")[0] in marked
    assert any("mover=tiles" in way and "not: " in way for way in ways)  # of what a ring passes on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((KERNEL, "--schedule", "all_gather.push", "--numbers", "M=2048"), "BLOCK_M is no whole number"),
        ((KERNEL, "--schedule", "all_gather.push", "--numbers", "M=2,M=3"), "'M=3'"),
        ((KERNEL, "--schedule", "all_gather.push", "--numbers", "M=2**8"), "NAME=NUMBER"),
        ((KERNEL, "--schedule", "all_gather.push", "--schedule", "X:ring", "--numbers", "M=2"), "TENSOR:SCHEDULE"),
        (("--numbers", NUMBERS, KERNEL), "--schedule"),
        (("all_gather_matmul", "--shape", "8,8,8", "--numbers", "M=1"), "--numbers"),
    ],
)
def test_operators_and_kernels_are_asked_for_in_their_own_words(words: tuple[str, ...], found: str):
    assert found in run(*words, exit_code=2)


@pytest.mark.slow
def test_the_static_heuristic_is_told_for_the_machine_that_is_named():
    words = ("all_gather_matmul", "--shape", "16384,8192,8192")
    assert "without a say in what runs, the static heuristic: per_shard\n" in run(*words, "--world", "4")
    assert "full_mesh of mi300x8" in run(*words, "--world", "8", "--machine", "mi300x8")
    assert "leave one of the two out" in run(*words, "--machine", "mi300x8", "--device", "cpu", exit_code=2).lower()
    assert "static heuristic" not in run("matmul_all_reduce", *words[1:], "--device", "cpu")
    assert "abacus" in run(*words, "--machine", "abacus", exit_code=2)
