"""What a quick launch hands to Triton's C launcher, held against what Triton's own wrapper hands to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia

from campaigns.lint.lint_case import PLAIN
from campaigns.lint.lint_matmul import Stored, Tile, call_of
from overweave.compat import triton_names
from overweave.compat.versions import Home
from overweave.errors import KernelUnavailable
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.runtime.gpu.launcher import PackedLaunch, compiled_for
from overweave.runtime.kernel_calls.call import Moving
from tools.aot import source_of_launch

ENDING = Epilogue(bias=True, activation="silu", residual=True)
TILES = [
    Tile("bfloat16", MatmulConfig(), PLAIN),
    Tile("bfloat16", MatmulConfig(), PLAIN, ENDING, weights=3),
    Tile("bfloat16", MatmulConfig(kernel="hopper"), PLAIN, ENDING, addends=1, stored=Stored(3, True)),
]
MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 2, "block_size": [64, 64], "fp4_padded": False}
STREAM, FUNCTION, PROGRAMS, WORDS = 7, 11, 3, (4, 1, 1024)


class Launcher:
    """Triton's C launcher: keeps the arguments of the last launch."""

    given: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        self.given = plain(arguments)


def plain(value: Any) -> Any:
    """Arguments with tensors as their addresses: the C launcher asks tensors, and takes lists as it takes tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return value.data_ptr() if hasattr(value, "data_ptr") else value


@pytest.fixture
def c_launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """What Triton's wrapper calls in the end, of every version. No driver is asked, and no C is compiled."""
    recorded = Launcher()
    names = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")  # of 3.6, and from 3.7 on
    utils = SimpleNamespace(
        launch=recorded,
        build_signature_metadata=lambda kinds: ",".join(kinds).encode(),
        **dict.fromkeys(names, lambda address, *rest: ("map", address)),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(nvidia, "library_dirs", list)
    compiles = SimpleNamespace(launch=recorded)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda *given, **named: compiles, raising=False)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **said: tuple(said.values()), raising=False)
    return recorded


def compiled_of(signature: dict[str, Any], depends: bool = False) -> Any:
    """A kernel of such a signature, compiled and loaded, with Triton's own wrapper of its launcher."""
    maps = [MAP for kind in signature.values() if str(kind).startswith("tensordesc")]
    metadata = SimpleNamespace(
        tensordesc_meta=maps or None,
        launch_pdl=depends,
        launch_cooperative_grid=False,
        instrumentation_mode="",
        num_ctas=1,
        **{f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")},
    )
    source = SimpleNamespace(constants={}, signature=signature, fn=SimpleNamespace(arg_names=[*signature]))
    run = nvidia.CudaLauncher(source, metadata)
    return SimpleNamespace(run=run, metadata=metadata, function=FUNCTION, packed_metadata=WORDS)


def wrapped(compiled: Any, arguments: list[Any]) -> None:
    """A launch by Triton's public face."""
    compiled.run(PROGRAMS, 1, 1, STREAM, FUNCTION, WORDS, None, None, None, *arguments)


def signature_of(tile: Tile) -> tuple[dict[str, Any], list[Any]]:
    """What a launch of a tile's kernel is specialised for, constants by that name; and its arguments."""
    kernel, arguments, options, _ = call_of(tile)
    source = source_of_launch(kernel, arguments, options, "")
    return {name: _kinds(source.signature.get(name, "constexpr")) for name in kernel.arg_names}, arguments


def _kinds(kind: Any) -> Any:
    return tuple(map(_kinds, kind)) if isinstance(kind, tuple) else kind if isinstance(kind, str) else "constexpr"


@pytest.mark.parametrize("depends", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_quick_launch_hands_on_what_tritons_wrapper_does(tile: Tile, depends: bool, c_launcher: Launcher) -> None:
    signature, arguments = signature_of(tile)
    compiled = compiled_of(signature, depends)
    wrapped(compiled, arguments)
    wanted = c_launcher.given
    assert {STREAM, FUNCTION, PROGRAMS, depends} <= {one for one in wanted if type(one) in (int, bool)}
    c_launcher.given = ()
    launch = PackedLaunch(compiled, PROGRAMS, arguments)
    assert launch.is_quick
    launch(STREAM)
    assert c_launcher.given == wanted


def tuples(given: tuple[Any, ...]) -> Iterator[Any]:
    """The kernel's own arguments, behind those of the launch."""
    quick = triton_names.quick_launch(compiled_of({}))
    assert quick is not None
    behind = given[4 + len(quick.head) :]
    yield from behind if quick.is_flat else behind[0]


KINDS = {"parts": ("*bf16", "i32", "constexpr", "*bf16"), "bias": "*bf16", "n": "i32"}


def test_what_moves_in_a_tuple_is_found_where_it_is_now(c_launcher: Launcher) -> None:
    out, bias = Moving(16, torch.bfloat16), Moving(32, torch.bfloat16)
    launch = PackedLaunch(compiled_of(KINDS), PROGRAMS, [(out, 7, None, bias), bias, 5])
    launch(0)
    assert [*tuples(c_launcher.given)] == [(16, 7, None, 32), 32, 5]
    out.address = 48
    launch(0)
    assert [*tuples(c_launcher.given)] == [(48, 7, None, 32), 32, 5]
    out.address, bias.address = 64, 80
    launch(0)
    assert [*tuples(c_launcher.given)] == [(64, 7, None, 80), 80, 5]


def test_a_launch_keeps_the_tensors_alive_whose_addresses_it_hands_on(c_launcher: Launcher) -> None:
    table, word = torch.zeros(4), torch.zeros(1)
    seen, address = [weakref.ref(table), weakref.ref(word)], table.data_ptr()
    kinds = {"table": "*fp32", "word": ("*fp32", "i32")}
    launch = PackedLaunch(compiled_of(kinds), PROGRAMS, [table, (word, 7)])
    del table, word
    gc.collect()
    launch(0)
    assert [ref() is None for ref in seen] == [False, False]
    assert next(tuples(c_launcher.given)) == address
    del launch
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True]


def without_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that has renamed what encodes descriptors."""
    monkeypatch.setitem(triton_names.NAMES, "encode_tensor_map", (Home("", "triton", "elsewhere"),))
    monkeypatch.delitem(vars(triton_names), "encode_tensor_map", raising=False)


def test_where_a_private_name_has_moved_tritons_wrapper_launches(
    c_launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature, arguments = signature_of(TILES[2])
    compiled = compiled_of(signature)
    wrapped(compiled, arguments)
    wanted = c_launcher.given
    without_encoder(monkeypatch)
    launch = PackedLaunch(compiled, PROGRAMS, arguments)
    assert not launch.is_quick
    launch(STREAM)
    assert c_launcher.given == wanted


def test_a_kernel_that_triton_refuses_is_named_with_what_it_said() -> None:
    def warmup(*given: Any, **named: Any) -> None:
        raise ValueError("no such instruction")

    kernel = SimpleNamespace(__name__="tile_kernel", warmup=warmup)
    with pytest.raises(KernelUnavailable, match=r"compile tile_kernel: ValueError: no such instruction\. Use a Triton"):
        compiled_for(kernel, [], (1,), {})


def test_every_compilation_says_whether_it_fuses_multiplications_with_additions() -> None:
    said: dict[str, Any] = {}
    made = SimpleNamespace(_init_handles=lambda: None)
    kernel = SimpleNamespace(warmup=lambda *given, **named: said.update(named) or made)
    assert compiled_for(kernel, [], (1,), {"num_warps": 4}) is made
    assert said == {"grid": (1,), "num_warps": 4, "enable_fp_fusion": True}
