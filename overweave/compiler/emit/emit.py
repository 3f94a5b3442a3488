"""Emits the fused kernel as source text: the author's kernel, with the order of a tile table, with waits and notifies.

Only these change: parameters are added; the tile's number is claimed from the table instead of `tl.program_id`, and the
blocks are computed from it instead of by the dispatch region; one wait stands above the first load of what arrives; an
annotated store writes NaN if a wait failed; one notify follows the last store. A loop over a streamed axis gets a
loop over its parts around it, with one wait for each part.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import Statement, is_constant
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.source.language import accesses_in, is_stored_value, used_names
from overweave.compiler.frontend.source.module import fused_module
from overweave.compiler.frontend.symbols.directives import SHAPE
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.errors import InputError, MachineError
from overweave.ir.plan import DataPath

LANG = "overweave_lang"
PROTOCOL = ("table", "claims", "signals", "words", "limits", "tiles", "parts", "world_size")
PARAMETERS = tuple(f"overweave_{name}" for name in PROTOCOL)
PUSH_PARAMETERS = ("overweave_targets", "overweave_slices")  # of tiles that push slices to peers
STORE_PLACES = "overweave_places"  # of tiles that store to peers: the table of destination addresses
_WAIT_ARGUMENTS = "overweave_signals, overweave_words, overweave_limits, overweave_world_size"


class FusionOptions(Struct, frozen=True):
    """Which waits, signals and peer accesses to emit into a kernel. waited_tensors: a tile waits for its rows of these

    before its first load of them. dual_source: the tensor that a tile reads from the caller's shard or from the receive
    buffer, as its row of the tile table says. waits_in_loop: a streamed (K) loop waits for each part. notifies: a tile
    signals when it is stored. push_path: by what instructions tiles push slices to peers, None if they do not.
    stored_at_peers: the tensor that tiles store to peers. exchanges: (tensor, schedule), for the module's docstring.
    """

    waited_tensors: frozenset[str]
    dual_source: str | None
    waits_in_loop: bool
    notifies: bool
    push_path: DataPath | None
    stored_at_peers: str | None
    exchanges: tuple[tuple[str, str], ...]

    @property
    def has_wait_status(self) -> bool:
        """Whether tiles wait: `overweave_verdict` is then emitted, 1 unless a wait timed out."""
        return bool(self.waited_tensors) or self.waits_in_loop


def emit(kernel: AnnotatedKernel, options: FusionOptions) -> str:
    """Return the text of a module that holds the fused kernel, under its author's name, and all that it needs."""
    tile = _Tile(kernel, options)
    body = tile.statements()
    function = kernel.source.function
    statements: list[cst.CSTNode] = list(function.body.body)
    if kernel.tile_loop is None:
        statements = list(body)
    else:
        statements[kernel.tile_loop : kernel.tile_loop + 1] = _claiming_loop(kernel, [*tile.push_slices(), *body])
    fused = function.with_changes(
        params=_with_parameters(function.params, parameters_of(kernel, options)),
        body=function.body.with_changes(body=statements),
    )
    return fused_module(kernel.source, fused, options.exchanges)


class _Tile:
    """Rewrites the author's statements of one tile.

    wait_at: index of the statement before which the tile waits, -1 if nowhere. verdict_at: the first statement after a
    wait. notify_at: the statement after which the tile notifies. number: the variable of the tile's number.
    """

    def __init__(self, kernel: AnnotatedKernel, options: FusionOptions) -> None:
        self.kernel, self.options = kernel, options
        waited_loads = [load.index for load in kernel.loads if load.directive.tensor in options.waited_tensors]
        streamed_loops = [stream.index for stream in kernel.streams] if options.waits_in_loop else []
        self.wait_at = min([*waited_loads, *streamed_loops]) if waited_loads else -1
        wait_positions = [self.wait_at] if waited_loads else streamed_loops
        self.verdict_at = min(wait_positions, default=len(kernel.body))  # stores before it need no verdict
        last_store = max(store.index for store in kernel.stores)
        self.notify_at = max([last_store, *wait_positions])  # as in the schedule: all waits, then the notify
        self.number = kernel.tile_variable or "overweave_tile"

    def statements(self) -> list[cst.CSTNode]:
        """Return the author's statements with the tile's claim, its block indices, its wait and its notify inserted."""
        kernel, emitted = self.kernel, list[cst.CSTNode]()
        regions = (*((kernel.dispatch,) if kernel.dispatch else ()), *kernel.repeated_dispatch)
        for index, statement in enumerate(kernel.body):
            inserted = self._claim() if kernel.tile_loop is None and index == kernel.tile_start else []
            region = _region_starting_at(regions, index)
            inserted += self._block_indices(regions.index(region)) if region else []
            emitted += _with_leading_comments(inserted, statement) if inserted else []
            if index == self.wait_at:
                emitted += self._wait()
            if (kernel.tile_loop is None and index == kernel.tile_start) or any(lo <= index < hi for lo, hi in regions):
                continue
            emitted += self._rewrite(index, statement)
            if index == self.notify_at:
                emitted += self._notify()
        return emitted

    def _claim(self) -> list[cst.CSTNode]:
        """Emit `overweave_row = overweave_lang.claim_tile(overweave_claims)`, slices to push, and the tile's number."""
        claim = _parse(f"overweave_row = {LANG}.claim_tile(overweave_claims)")
        return [claim, *self.push_slices(), self._tile_number(), *self._select_source()]

    def push_slices(self) -> list[cst.CSTNode]:
        """Emit `overweave_lang.push_slices(...)`: before the tile, claim slices from a counter and push them to peers.

        The source is the dual-source tensor; without one, `overweave_targets` fills an argument that is not read.
        """
        if self.options.push_path is None:
            return []
        source = _parameter_of_load(self.kernel, self.options.dual_source) or "overweave_targets"
        table = "overweave_table, overweave_row, overweave_claims, overweave_targets"
        slices = f"overweave_tiles + overweave_parts, overweave_slices, BULK={self.options.push_path == 'bulk'}"
        return [_parse(f"{LANG}.push_slices(\n    {table},\n    {source}, {slices}\n)")]

    def _select_source(self) -> list[cst.CSTNode]:
        """Emit `a = overweave_lang.select_source(overweave_table, overweave_row, a, overweave_a, N)`."""
        tensor, accesses = self.options.dual_source, (load.directive for load in self.kernel.loads)
        access = next((access for access in accesses if access.tensor == tensor), None)
        if access is None:
            return []
        axes = {axis.name: axis.extent for axis in self.kernel.axes}
        extents = [_factor_text(axes.get(str(dim), dim)) for dim in access.dims[1:]] or ["1"]
        own, row = access.parameter, "overweave_table, overweave_row"
        return [_parse(f"{own} = {LANG}.select_source({row}, {own}, overweave_{own}, {' * '.join(extents)})")]

    def _tile_number(self) -> cst.CSTNode:
        """Emit `pid = overweave_lang.tile_number(overweave_table, overweave_row)` for `pid = tl.program_id(0)`."""
        assignment = _parse(f"{self.number} = {LANG}.tile_number(overweave_table, overweave_row)")
        if not self.kernel.tile_variable:
            return assignment
        author_statement = self.kernel.body[self.kernel.tile_start]
        assert isinstance(author_statement, cst.SimpleStatementLine)
        return author_statement.with_changes(leading_lines=()).visit(_Numbering(self.kernel))  # type: ignore[return-value]

    def _block_indices(self, region: int) -> list[cst.CSTNode]:
        """Emit `pid_m = pid // blocks_n`, `pid_n = pid % blocks_n`: the blocks of a tile, row-major over the grid."""
        counts = [f"{LANG}.blocks({text_of(axis.extent)}, {text_of(axis.block)})" for axis in self.kernel.grid]
        number, emitted = self.number, list[cst.CSTNode]()
        if number in self.kernel.block_variables.values():  # a block overwrites the number: keep a copy
            number = "overweave_tile"
            emitted += [_parse(f"{number} = {self.number}")] if region == 0 else []
        for dim, axis in enumerate(self.kernel.grid):
            text = number + "".join(f" // {count}" for count in reversed(counts[dim + 1 :]))
            text += f" % {counts[dim]}" if dim else ""
            emitted.append(_parse(f"{self.kernel.block_variables[axis.name]} = {text}"))
        return emitted

    def _wait(self) -> list[cst.CSTNode]:
        """Emit `overweave_verdict = overweave_lang.wait_for_tile(overweave_table, overweave_row, ...)`."""
        return [_parse(f"overweave_verdict = {_wait_call('overweave_row')}")]

    def _rewrite(self, index: int, statement: Statement) -> list[cst.CSTNode]:
        """Rewrite the annotated stores of a statement; wrap a streamed loop into a loop over the parts that arrive."""
        stores = [store for store in self.kernel.stores if store.index == index]
        is_after_wait = index >= self.verdict_at
        emitted: list[cst.CSTNode] = [statement]
        if stores and (is_after_wait or self.options.stored_at_peers):
            visited = statement.visit(_Storing(self.kernel, self.options.stored_at_peers, is_after_wait))
            emitted = list(visited.nodes) if isinstance(visited, cst.FlattenSentinel) else [visited]  # type: ignore[list-item]
        for stream in self.kernel.streams if self.options.waits_in_loop else ():
            if stream.index == index:
                return self._loop_over_parts(emitted[0])
        return emitted

    def _loop_over_parts(self, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """Emit `for overweave_part in range(overweave_parts):`: wait for a part, and run the author's loop on it."""
        assert isinstance(statement, cst.For)
        outer = _parse("for overweave_part in range(overweave_parts):\n    pass\n")
        assert isinstance(statement.iter, cst.Call)
        low, high, *rest = statement.iter.args
        part_prologue = [
            _parse("overweave_here = overweave_tiles + overweave_part"),
            _parse(f"overweave_arrived = {_wait_call('overweave_here')}"),
            _parse("overweave_verdict = overweave_verdict & overweave_arrived"),
            _clip_to_part("low", low),
            _clip_to_part("high", high),
        ]
        assert isinstance(outer, cst.For)
        bounds = [arg.with_changes(value=cst.Name(f"overweave_{end}")) for arg, end in ((low, "low"), (high, "high"))]
        inner = statement.with_changes(leading_lines=(), iter=statement.iter.with_changes(args=(*bounds, *rest)))
        body = outer.body.with_changes(body=(*part_prologue, inner))
        initial_status = [] if self.wait_at >= 0 else [_parse("overweave_verdict = 1")]
        return _with_leading_comments([*initial_status, outer.with_changes(body=body)], statement)

    def _notify(self) -> list[cst.CSTNode]:
        """Emit `overweave_lang.finish_tile(overweave_table, overweave_row, overweave_signals, overweave_verdict)`.

        A tile that does not wait calls `announce_tile`, without a verdict; one that is stored to peers `.._at`.
        """
        # Bulk (TMA) stores complete before a notify, and before a tile that waits ends: a timeout report may follow.
        complete = [_parse(f"{LANG}.complete_bulk_stores()")] if stores_in_bulk(self.kernel) else []
        waits = self.options.has_wait_status
        if not self.options.notifies:
            return complete if waits else []
        call, verdict = ("finish_tile", ", overweave_verdict") if waits else ("announce_tile", "")
        row = "overweave_table, overweave_row"
        if self.options.stored_at_peers:
            return [*complete, _parse(f"{LANG}.{call}_at({row}, overweave_places{verdict}, overweave_world_size)")]
        return [*complete, _parse(f"{LANG}.{call}({row}, overweave_signals{verdict})")]


def parameters_of(kernel: AnnotatedKernel, options: FusionOptions) -> tuple[str, ...]:
    """Return the names of the parameters that the fused kernel has besides the author's."""
    arrived = [
        f"overweave_{one.directive.parameter}" for one in kernel.loads if one.directive.tensor == options.dual_source
    ]
    return (
        *dict.fromkeys(arrived),
        *PARAMETERS,
        *(PUSH_PARAMETERS if options.push_path else ()),
        *((STORE_PLACES,) if options.stored_at_peers else ()),
        *shape_parameters(kernel),
    )


def shape_parameters(kernel: AnnotatedKernel) -> dict[str, tuple[str, int]]:
    """Map each added parameter that stands for a `tensor.shape[dim]` of the directives to (tensor, dim)."""
    expressions = [number for axis in kernel.axes for number in (axis.extent, axis.block)]
    expressions += [dim for access in kernel.loads for dim in access.directive.dims]
    names = sorted({name for expression in expressions for name in expression.names})
    matches = {name: match for name in names if (match := SHAPE.fullmatch(name))}
    return {_shape_name(match): (match[1], int(match[2])) for match in matches.values()}


def _shape_name(match: re.Match[str]) -> str:
    """Return the parameter for `tensor.shape[0]`: `overweave_tensor_shape_0`."""
    return f"overweave_{match[1]}_shape_{match[2]}"


def text_of(expression: Polynomial) -> str:
    """Return an expression of a directive as the fused kernel spells it."""
    return SHAPE.sub(_shape_name, str(expression))


def _parameter_of_load(kernel: AnnotatedKernel, tensor: str | None) -> str | None:
    return next((load.directive.parameter for load in kernel.loads if load.directive.tensor == tensor), None)


def can_select_source(kernel: AnnotatedKernel, tensor: str) -> bool:
    """Whether tiles can load a tensor from either of two buffers: by `tl.load`, of a pointer that only tiles use."""
    accesses = [load for load in kernel.loads if load.directive.tensor == tensor]
    language, parameters = kernel.source.language, {load.directive.parameter for load in accesses}
    calls = [call for load in accesses for call in accesses_in(load.statement, "load", language)]
    is_written = any(store.directive.parameter in parameters for store in kernel.stores)
    used_before = {name for statement in kernel.body[: kernel.tile_start] for name in used_names(statement)}
    is_used_in_tile = kernel.tile_loop is None and not is_written and not used_before & parameters
    return is_used_in_tile and bool(calls) and all(language.tl_name(call) for call in calls)


def can_store_at_peers(kernel: AnnotatedKernel, tensor: str) -> bool:
    """Whether tiles can store a tensor to peers: by one `tl.store` on its own line; no descriptor addresses a peer."""
    stores = [store for store in kernel.stores if store.directive.tensor == tensor]
    language = kernel.source.language
    calls = [call for store in stores for call in accesses_in(store.statement, "store", language)]
    is_alone = all(len(getattr(store.statement, "body", ())) == 1 for store in stores)
    return len(calls) == 1 and is_alone and bool(language.tl_name(calls[0]))


def stores_in_bulk(kernel: AnnotatedKernel) -> bool:
    """Whether a tile is stored through a descriptor (TMA): it must complete before a notify or a timeout report."""
    language = kernel.source.language
    calls = [call for store in kernel.stores for call in accesses_in(store.statement, "store", language)]
    return any(language.method_name(call) for call in calls)


def _factor_text(extent: Polynomial) -> str:
    """Return an expression as a factor of a product, in parentheses if it is a sum."""
    return text_of(extent) if len(extent.terms) == 1 else f"({text_of(extent)})"


def _wait_call(row: str) -> str:
    """Return `overweave_lang.wait_for_tile(overweave_table, ROW, ...)`."""
    return f"{LANG}.wait_for_tile(\n    overweave_table, {row}, {_WAIT_ARGUMENTS}\n)"


def _clip_to_part(end: str, bound: cst.Arg) -> cst.CSTNode:
    """Emit `overweave_low = overweave_lang.part_low(overweave_table, overweave_here, LOW)`, or the same of `high`."""
    line = cst.parse_statement(f"overweave_{end} = {LANG}.part_{end}(overweave_table, overweave_here, 0)")
    assert isinstance(line, cst.SimpleStatementLine)
    assignment = line.body[0]
    assert isinstance(assignment, cst.Assign)
    assert isinstance(assignment.value, cst.Call)
    call = assignment.value.with_changes(args=(*assignment.value.args[:2], cst.Arg(bound.value)))
    return line.with_changes(body=(assignment.with_changes(value=call),))


def _region_starting_at(regions: tuple[tuple[int, int], ...], index: int) -> tuple[int, int] | None:
    """Return the dispatch region that begins at a statement, or None."""
    return next((region for region in regions if region[0] == index), None)


class _Numbering(cst.CSTTransformer):
    """Replaces `tl.program_id(0)` by `overweave_lang.tile_number(overweave_table, overweave_row)`."""

    def __init__(self, kernel: AnnotatedKernel) -> None:
        super().__init__()
        self.language = kernel.source.language

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        numbered = f"{LANG}.tile_number(overweave_table, overweave_row)"
        return cst.parse_expression(numbered) if self.language.tl_name(original_node) == "program_id" else updated_node


class _Storing(cst.CSTTransformer):
    """Rewrites annotated stores, of `kernel`. tensor: the one that is stored to peers; None if no tile does.

    After a wait: `tl.store(p, overweave_lang.voided(v, overweave_verdict))`. Of the tensor that is stored to peers:
    `tl.store(p + overweave_away, v)`, in a loop over the ranks that get the tile.
    """

    def __init__(self, kernel: AnnotatedKernel, tensor: str | None, is_after_wait: bool) -> None:
        super().__init__()
        self.is_after_wait = is_after_wait
        self.calls = [
            (store, call)
            for store in kernel.stores
            for call in accesses_in(store.statement, "store", kernel.source.language)
        ]
        self.remote_stores = [store for store in kernel.stores if store.directive.tensor == tensor]

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Void the stored value after a wait, and move the pointer of a store to peers."""
        store = next((store for store, call in self.calls if call is original_node), None)
        if store is None:
            return updated_node
        args = list(updated_node.args)
        if self.is_after_wait:
            at = next(at for at, arg in enumerate(args) if is_stored_value(at, arg))
            args[at] = args[at].with_changes(value=_voided_call(args[at].value))
        if any(store is one for one in self.remote_stores):
            at = next((at for at, arg in enumerate(args) if arg.keyword and arg.keyword.value == "pointer"), 0)
            args[at] = args[at].with_changes(value=_displaced_pointer(args[at].value))
        return updated_node.with_changes(args=args)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Wrap a store to peers into `for overweave_place in range(overweave_count):`, over its destination ranks."""
        store = next((one for one in self.remote_stores if one.statement is original_node), None)
        if store is None:
            return updated_node
        table, world_size = "overweave_table, overweave_row, overweave_places", "overweave_world_size"
        count = _parse(f"overweave_count = {LANG}.place_count({table}, {world_size})")
        loop = _parse("for overweave_place in range(overweave_count):\n    pass\n")
        pointer = store.directive.parameter
        away = _parse(f"overweave_away = {LANG}.away(\n    {table}, overweave_place, {world_size}, {pointer}\n)")
        assert isinstance(loop, cst.For)
        author_store = updated_node.with_changes(leading_lines=())
        emitted = [count, loop.with_changes(body=loop.body.with_changes(body=(away, author_store)))]
        return cst.FlattenSentinel(_with_leading_comments(emitted, original_node))  # type: ignore[arg-type]


def _voided_call(value: cst.BaseExpression) -> cst.Call:
    """Return `overweave_lang.voided(VALUE, overweave_verdict)`: NaN where a wait failed."""
    return cst.Call(
        func=cst.parse_expression(f"{LANG}.voided"),
        args=(
            cst.Arg(value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))),
            cst.Arg(cst.Name("overweave_verdict")),
        ),
    )


def _displaced_pointer(pointers: cst.BaseExpression) -> cst.BinaryOperation:
    """Return `POINTERS + overweave_away`."""
    is_plain = isinstance(pointers, cst.Name) or bool(pointers.lpar)
    left = pointers if is_plain else pointers.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.BinaryOperation(left, cst.Add(), cst.Name("overweave_away"))


def _claiming_loop(kernel: AnnotatedKernel, body: list[cst.CSTNode]) -> list[cst.CSTNode]:
    """Emit `while overweave_row < overweave_tiles:` for the loop over tiles, with a claim before and at its end."""
    assert kernel.tile_loop is not None
    loop = kernel.source.function.body.body[kernel.tile_loop]
    claim = _parse(f"overweave_row = {LANG}.claim_tile(overweave_claims)")
    while_loop = _parse("while overweave_row < overweave_tiles:\n    pass\n")
    assert isinstance(while_loop, cst.While)
    assert isinstance(loop, cst.For)
    tile_number = _parse(f"{kernel.tile_variable} = {LANG}.tile_number(overweave_table, overweave_row)")
    block = loop.body.with_changes(body=(tile_number, *body, claim))
    return _with_leading_comments([claim, while_loop.with_changes(body=block)], loop)


def _with_parameters(params: cst.Parameters, added: tuple[str, ...]) -> cst.Parameters:
    """Insert parameters before the first that is a constexpr or has a default."""
    listed = list(params.params)
    position = next((i for i, one in enumerate(listed) if one.default or is_constant(one)), len(listed))
    style = listed[0].comma if listed and isinstance(listed[0].comma, cst.Comma) else cst.MaybeSentinel.DEFAULT
    listed[position:position] = [cst.Param(cst.Name(name), comma=style) for name in added]
    return params.with_changes(params=listed)


def _with_leading_comments(emitted: list[cst.CSTNode], replaced: Statement) -> list[cst.CSTNode]:
    """Move the comments above a replaced statement to the first of the emitted ones."""
    lines = replaced.leading_lines if isinstance(replaced, cst.SimpleStatementLine | cst.For) else ()
    return [emitted[0].with_changes(leading_lines=lines), *emitted[1:]]


def _parse(text: str) -> cst.CSTNode:
    return cst.parse_statement(text)


# Triton reads a kernel's source from its file, so a fused kernel must have one. A file with any other text than
# the one just emitted is overwritten.

_LOADED: dict[Path, Any] = {}  # file -> module


def generated_path(folder: Path, name: str, text: str) -> Path:
    """Return the path of the fused kernel `name`: its name and a digest of its text."""
    return folder / f"{name}_{blake2b(text.encode(), digest_size=8).hexdigest()}.py"


def write_generated(folder: Path, name: str, text: str) -> Path:
    """Write the file atomically, unless it exists with this text. Return its path. Raises MachineError."""
    path = generated_path(folder, name, text)
    try:
        if not path.is_file() or path.read_bytes() != text.encode():
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.draft")
            draft.write_bytes(text.encode())
            draft.replace(path)
    except OSError as error:
        cure = "Set OVERWEAVE_CACHE_DIR to a folder that can be written"
        raise MachineError(f"write the fused kernel {path.name}", str(error), cure) from error
    return path


def load_generated(folder: Path, name: str, text: str) -> Any:
    """Import the fused kernel `name` from its file, once. Raises MachineError, and InputError if the import fails."""
    path = write_generated(folder, name, text)
    if path not in _LOADED:
        spec = spec_from_file_location(f"overweave_generated_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise MachineError(f"import {path.name}", "Python has no loader for it", "Report this")
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            cure = "Let the file define or import, at its top level, all that the kernel uses"
            raise InputError(
                f"import the fused kernel {name}", f"{type(error).__name__}: {error}"[:200], cure
            ) from error
        _LOADED[path] = module
    return getattr(_LOADED[path], name)
