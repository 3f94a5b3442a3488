"""What a launch hands to Triton's own launcher, held against what that launcher says it takes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia.driver import make_launcher

from campaigns.lint.lint_case import PLAIN
from campaigns.lint.lint_matmul import Stored, Tile, call_of
from overweave.compiler.aot import source_of_launch
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.runtime.gpu import launcher
from overweave.runtime.gpu.launcher import PackedLaunch
from overweave.runtime.kernel_calls.call import Moving

ENDING = Epilogue(bias=True, activation="silu", residual=True)
TILES = [
    Tile("bfloat16", MatmulConfig(), PLAIN),
    Tile("bfloat16", MatmulConfig(split_tiles=1, split_k=2), PLAIN, ENDING, weights=3),
    Tile("bfloat16", MatmulConfig(kernel="hopper"), PLAIN, ENDING, addends=1, stored=Stored(3, True)),
]


class Launcher:
    """Triton's C launcher: keeps the arguments of the last launch, without those of the launch itself."""

    given: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        self.given = arguments[13:]


def format_of(signature: dict[str, Any], maps: list[object]) -> str:
    """How Triton's launcher reads the arguments of such a signature: `i`, `O`, ..., of a tuple in brackets."""
    source = make_launcher({}, signature, maps)
    found = re.search(r'PyArg_ParseTuple\(args, "([^"]*)"', source)
    assert found is not None
    return found[1][13:]


def format_given(given: tuple[Any, ...]) -> str:
    """The same of arguments: their brackets."""
    return "".join(f"({format_given(one)})" if isinstance(one, tuple) else "." for one in given)


def leaves(given: Any) -> Iterator[Any]:
    for one in given:
        if isinstance(one, tuple):
            yield from leaves(one)
        else:
            yield one


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any], int], tuple[PackedLaunch, Launcher]]:
    """A launch on no GPU, whose descriptors are encoded as their addresses."""

    def encoded(descriptor: Any, metadata: object) -> list[Any]:
        return [descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides]

    def packed(arguments: list[Any], maps: int) -> tuple[PackedLaunch, Launcher]:
        triton_launcher = Launcher()
        run = SimpleNamespace(launch=triton_launcher, global_scratch_size=0, profile_scratch_size=0)
        metadata = SimpleNamespace(tensordesc_meta=[{}] * maps)
        compiled = SimpleNamespace(run=run, metadata=metadata, function=0, packed_metadata=())
        return PackedLaunch(compiled, 1, arguments), triton_launcher

    monkeypatch.setattr(launcher, "make_tensordesc_arg", encoded)
    return packed


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_arguments_are_packed_as_the_launcher_expands_the_signature(tile: Tile, pack: Any) -> None:
    kernel, arguments, options, _ = call_of(tile)
    source = source_of_launch(kernel, arguments, options, "")
    kinds = {name: source.signature.get(name, "constexpr") for name in kernel.arg_names}
    kinds = {
        name: kind if isinstance(kind, str) else tuple(part if isinstance(part, str) else "constexpr" for part in kind)
        for name, kind in kinds.items()
    }
    maps = [kind for kind in kinds.values() if str(kind).startswith("tensordesc")]
    launch, given = pack(arguments, len(maps))
    launch(0)
    wanted = format_of(kinds, maps)
    assert format_given(given.given) == re.sub(r"[^()]", ".", wanted)
    assert "(" in wanted
    each = zip(leaves(given.given), re.sub(r"[()]", "", wanted), strict=True)
    numbers = [leaf for leaf, kind in each if kind in "iL"]
    assert numbers
    assert all(type(leaf) is int for leaf in numbers)


def test_what_moves_in_a_tuple_is_found_where_it_is_now(pack: Any) -> None:
    out, bias = Moving(16, torch.bfloat16), Moving(32, torch.bfloat16)
    launch, given = pack([(out, 7, None, bias), bias, 5], 0)
    launch(0)
    assert given.given == ((16, 7, None, 32), 32, 5)
    out.address = 48
    launch(0)
    assert given.given == ((48, 7, None, 32), 32, 5)
    out.address, bias.address = 64, 80
    launch(0)
    assert given.given == ((64, 7, None, 80), 80, 5)


def test_a_launch_keeps_the_tensors_alive_whose_addresses_it_hands_on(pack: Any) -> None:
    table, word = torch.zeros(4), torch.zeros(1)
    seen, address = [weakref.ref(table), weakref.ref(word)], table.data_ptr()
    launch, given = pack([table, (word, 7)], 0)
    del table, word
    gc.collect()
    launch(0)
    assert [ref() is None for ref in seen] == [False, False]
    assert given.given[0] == address
    del launch
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True]
