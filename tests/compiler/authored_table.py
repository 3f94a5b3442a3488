"""What the campaign of compiled kernels runs on GPUs, on CPU ranks, interpreted: every kernel with every schedule.

Run by test_authored.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import pytest

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.gpu_authored import ordinary, outcomes, particular  # noqa: E402
from campaigns.lint.authored_cases import AUTHORS, KERNELS  # noqa: E402
from overweave.compiler.emit.fuse import kernel_of  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host author")  # here, once, and not in every rank
try_in_copies()
for name, author in AUTHORS.items():
    kernel_of(KERNELS / f"{name}.py", author.name)  # what is read before ranks fork, none of them reads again
CALLS = 2  # the second one finds the memory as the first one left it
OF_EIGHT = ("reduce_scatter.islands", "all_gather.islands")


def trials(ranks: int) -> list[tuple[int, str]]:
    """Numbers and words of what so many ranks are asked."""
    every = [trial.words for trial in (*particular(ranks), *ordinary())]
    return [(at, words) for at, words in enumerate(every) if ranks < 8 or words.endswith(OF_EIGHT)]


def wrong(number: int) -> list[str]:
    """For `run_ranks`: what is wrong with calls of a trial."""
    trial = [*particular(resolve(None).world_size), *ordinary()][number]
    return [found for found in outcomes(trial, CALLS) if found]


@pytest.mark.parametrize(
    ("number", "ranks"),
    [pytest.param(number, ranks, id=f"{words}-{ranks}") for ranks in (3, 2, 4, 8) for number, words in trials(ranks)],
)
def test_every_kernel_with_every_schedule(number: int, ranks: int):
    assert run_ranks(wrong, ranks, number) == [[]] * ranks
