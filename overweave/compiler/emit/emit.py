"""The fused kernel as source text: the author's, with a tile table in place of its own order, waits and signals.

What changes, and nothing else does: parameters of the protocol; the tile's number, which is claimed from the table;
the dispatch region, which the number replaces; one wait above the first load of what arrives; each annotated store,
which writes NaN if the wait was void; one signal behind the last store. A loop over a streamed axis becomes a loop over
its parts around the same loop, with one wait for each part.
"""

from __future__ import annotations

import re

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import Statement, is_constant
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.source.language import is_value
from overweave.compiler.frontend.source.module import fused_module
from overweave.compiler.frontend.source.names import accesses_in, used_names
from overweave.compiler.frontend.symbols.expressions import SHAPE
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.ir.plan import DataPath

LANG = "overweave_lang"
PROTOCOL = ("table", "claims", "signals", "words", "limits", "tiles", "parts", "world_size")
PARAMETERS = tuple(f"overweave_{name}" for name in PROTOCOL)
CARRYING = ("overweave_targets", "overweave_slices")  # where tiles carry what goes to peers
PLACES = "overweave_places"  # where tiles store
_WAITED = "overweave_signals, overweave_words, overweave_limits, overweave_world_size"


class Weaving(Struct, frozen=True):
    """What a schedule asks of the kernel. waits: tensors whose rows a tile waits for before its first load of them.
    chosen: the tensor of which a tile reads the caller's shard or what has arrived, by its row of the table.

    streams: whether parts are waited for in the loop. signals: whether a tile is announced when it is stored.
    carries: how tiles move slices of what goes to peers, if they do. away: the tensor that tiles store at peers.
    exchanges: tensor and schedule, for the reader.
    """

    waits: frozenset[str]
    chosen: str | None
    streams: bool
    signals: bool
    carries: DataPath | None
    away: str | None
    exchanges: tuple[tuple[str, str], ...]

    @property
    def has_verdict(self) -> bool:
        return bool(self.waits) or self.streams


def emit(kernel: AnnotatedKernel, weaving: Weaving) -> str:
    """The text of a module that holds the fused kernel under its author's name, and all it needs."""
    tile = _Tile(kernel, weaving)
    body = tile.statements()
    function = kernel.source.function
    statements: list[cst.CSTNode] = list(function.body.body)
    if kernel.loop is None:
        statements = list(body)
    else:
        statements[kernel.loop : kernel.loop + 1] = _persistent(kernel, [*tile.carried(), *body])
    fused = function.with_changes(
        params=_with_protocol(function.params, parameters_of(kernel, weaving)),
        body=function.body.with_changes(body=statements),
    )
    return fused_module(kernel.source, fused, weaving.exchanges)


class _Tile:
    """The statements of one tile, rewritten."""

    def __init__(self, kernel: AnnotatedKernel, weaving: Weaving) -> None:
        self.kernel, self.weaving = kernel, weaving
        guarded = [load.index for load in kernel.loads if load.directive.tensor in weaving.waits]
        parts = [stream.index for stream in kernel.streams] if weaving.streams else []
        self.wait_at = min([*guarded, *parts]) if guarded else -1
        begun = [self.wait_at] if guarded else parts
        self.verdict_at = min(begun, default=len(kernel.body))  # what is stored above has waited for nothing
        stored_at = max(store.index for store in kernel.stores)
        self.announced_at = max([stored_at, *begun])  # as in the schedule: all waits, then the signal
        self.number = kernel.number or "overweave_tile"

    def statements(self) -> list[cst.CSTNode]:
        kernel, made = self.kernel, list[cst.CSTNode]()
        regions = (*((kernel.dispatch,) if kernel.dispatch else ()), *kernel.again)
        for index, statement in enumerate(kernel.body):
            begun = self._claimed() if kernel.loop is None and index == kernel.first else []
            begun += self._blocks(regions.index(region)) if (region := _begun(regions, index)) else []
            made += _led(begun, statement) if begun else []
            if index == self.wait_at:
                made += self._waited()
            if (kernel.loop is None and index == kernel.first) or any(lo <= index < hi for lo, hi in regions):
                continue
            made += self._rewritten(index, statement)
            if index == self.announced_at:
                made += self._announced()
        return made

    def _claimed(self) -> list[cst.CSTNode]:
        claim = _parse(f"overweave_row = {LANG}.claim_tile(overweave_claims)")
        return [claim, *self.carried(), self._numbered(), *self._chosen()]

    def carried(self) -> list[cst.CSTNode]:
        """The tile's share of what goes to peers, from the caller's tensor or from where a table says."""
        if self.weaving.carries is None:
            return []
        source = _parameter(self.kernel, self.weaving.chosen) or "overweave_targets"
        table = "overweave_table, overweave_row, overweave_claims, overweave_targets"
        slices = f"overweave_tiles + overweave_parts, overweave_slices, BULK={self.weaving.carries == 'bulk'}"
        return [_parse(f"{LANG}.carry_slices(\n    {table},\n    {source}, {slices}\n)")]

    def _chosen(self) -> list[cst.CSTNode]:
        """The pointer to a tensor that lies in two places, for the tile's rows of it."""
        access = next((one.directive for one in self.kernel.loads if one.directive.tensor == self.weaving.chosen), None)
        if access is None:
            return []
        axes = {axis.name: axis.extent for axis in self.kernel.axes}
        extents = [_factor(axes.get(str(dim), dim)) for dim in access.dims[1:]] or ["1"]
        own, arrived, row = access.parameter, f"overweave_{access.parameter}", "overweave_table, overweave_row"
        return [_parse(f"{own} = {LANG}.chosen_side({row}, {own}, {arrived}, {' * '.join(extents)})")]

    def _numbered(self) -> cst.CSTNode:
        """The author's statement with the table's number in the place of the program's."""
        numbered = _parse(f"{self.number} = {LANG}.tile_number(overweave_table, overweave_row)")
        if not self.kernel.number:
            return numbered
        asked = self.kernel.body[self.kernel.first]
        assert isinstance(asked, cst.SimpleStatementLine)
        return asked.with_changes(leading_lines=()).visit(_Numbering(self.kernel))  # type: ignore[return-value]

    def _blocks(self, region: int) -> list[cst.CSTNode]:
        """The tile's block along each axis, from its number: row-major over the grid."""
        counts = [f"{LANG}.blocks({text_of(axis.extent)}, {text_of(axis.block)})" for axis in self.kernel.grid]
        number, made = self.number, list[cst.CSTNode]()
        if number in self.kernel.blocks.values():  # the author's number becomes a block: keep it for the others
            number = "overweave_tile"
            made += [_parse(f"{number} = {self.number}")] if region == 0 else []
        for place, axis in enumerate(self.kernel.grid):
            text = number + "".join(f" // {count}" for count in reversed(counts[place + 1 :]))
            text += f" % {counts[place]}" if place else ""
            made.append(_parse(f"{self.kernel.blocks[axis.name]} = {text}"))
        return made

    def _waited(self) -> list[cst.CSTNode]:
        return [_parse(f"overweave_verdict = {_waited('overweave_row')}")]

    def _rewritten(self, index: int, statement: Statement) -> list[cst.CSTNode]:
        stores = [store for store in self.kernel.stores if store.index == index]
        is_voided = index >= self.verdict_at
        made: list[cst.CSTNode] = [statement]
        if stores and (is_voided or self.weaving.away):
            visited = statement.visit(_Storing(self.kernel, self.weaving.away, is_voided))
            made = list(visited.nodes) if isinstance(visited, cst.FlattenSentinel) else [visited]  # type: ignore[list-item]
        for stream in self.kernel.streams if self.weaving.streams else ():
            if stream.index == index:
                return self._streamed(made[0])
        return made

    def _streamed(self, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """The loop over parts around the author's loop, which keeps to the rows of one part."""
        assert isinstance(statement, cst.For)
        outer = _parse("for overweave_part in range(overweave_parts):\n    pass\n")
        assert isinstance(statement.iter, cst.Call)
        low, high, *rest = statement.iter.args
        waited = [
            _parse("overweave_here = overweave_tiles + overweave_part"),
            _parse(f"overweave_arrived = {_waited('overweave_here')}"),
            _parse("overweave_verdict = overweave_verdict & overweave_arrived"),
            _bounded("low", low),
            _bounded("high", high),
        ]
        assert isinstance(outer, cst.For)
        bounds = [arg.with_changes(value=cst.Name(f"overweave_{end}")) for arg, end in ((low, "low"), (high, "high"))]
        inner = statement.with_changes(
            leading_lines=(),
            iter=statement.iter.with_changes(args=(*bounds, *rest)),
        )
        body = outer.body.with_changes(body=(*waited, inner))
        begun = [] if self.wait_at >= 0 else [_parse("overweave_verdict = 1")]
        return _led([*begun, outer.with_changes(body=body)], statement)

    def _announced(self) -> list[cst.CSTNode]:
        complete = [_parse(f"{LANG}.complete_bulk_stores()")] if stores_in_bulk(self.kernel) else []
        if not self.weaving.signals:
            return complete if self.weaving.has_verdict else []
        if self.weaving.away:
            tile = "overweave_table, overweave_row, overweave_places"
            verdict = "overweave_verdict, " if self.weaving.has_verdict else ""
            call = "finish_tile_at" if verdict else "announce_tile_at"
            return [*complete, _parse(f"{LANG}.{call}({tile}, {verdict}overweave_world_size)")]
        tile = "overweave_table, overweave_row, overweave_signals"
        waited = f"{LANG}.finish_tile({tile}, overweave_verdict)"
        made = [_parse(waited if self.weaving.has_verdict else f"{LANG}.announce_tile({tile})")]
        return complete + made


def parameters_of(kernel: AnnotatedKernel, weaving: Weaving) -> tuple[str, ...]:
    """What the fused kernel takes beside the author's: where the chosen tensor arrives, and the protocol's."""
    arrived = [f"overweave_{one.directive.parameter}" for one in kernel.loads if one.directive.tensor == weaving.chosen]
    return (
        *dict.fromkeys(arrived),
        *PARAMETERS,
        *(CARRYING if weaving.carries else ()),
        *((PLACES,) if weaving.away else ()),
        *shapes_of(kernel),
    )


def shapes_of(kernel: AnnotatedKernel) -> dict[str, tuple[str, int]]:
    """Parameter that the fused kernel takes -> the tensor of the call and the dimension whose extent it is."""
    said = [number for axis in kernel.axes for number in (axis.extent, axis.block)]
    said += [dim for access in kernel.loads for dim in access.directive.dims]
    names = sorted({name for one in said for name in one.names})
    found = {name: match for name in names if (match := SHAPE.fullmatch(name))}
    return {_shape_name(match): (match[1], int(match[2])) for match in found.values()}


def _shape_name(match: re.Match[str]) -> str:
    return f"overweave_{match[1]}_shape_{match[2]}"


def text_of(said: Polynomial) -> str:
    """What a directive says, as the fused kernel reckons it."""
    return SHAPE.sub(_shape_name, str(said))


def _parameter(kernel: AnnotatedKernel, tensor: str | None) -> str | None:
    """The kernel's parameter that holds a tensor which it loads."""
    return next((one.directive.parameter for one in kernel.loads if one.directive.tensor == tensor), None)


def can_choose(kernel: AnnotatedKernel, tensor: str) -> bool:
    """Whether every load of a tensor is `tl.load` through a pointer that is made anew in each tile."""
    accesses = [load for load in kernel.loads if load.directive.tensor == tensor]
    language, parameters = kernel.source.language, {one.directive.parameter for one in accesses}
    calls = [call for load in accesses for call in accesses_in(load.statement, "load", language)]
    written = any(store.directive.parameter in parameters for store in kernel.stores)
    used = {name for statement in kernel.body[: kernel.first] for name in used_names(statement)}
    is_late = kernel.loop is None and not written and not used & parameters
    return is_late and bool(calls) and all(language.word(call) for call in calls)


def can_store_away(kernel: AnnotatedKernel, tensor: str) -> bool:
    """Whether a tensor is stored by one `tl.store`, with a line of its own, as peers have no descriptors of theirs."""
    stores = [store for store in kernel.stores if store.directive.tensor == tensor]
    language = kernel.source.language
    calls = [call for store in stores for call in accesses_in(store.statement, "store", language)]
    is_alone = all(len(getattr(store.statement, "body", ())) == 1 for store in stores)
    return len(calls) == 1 and is_alone and bool(language.word(calls[0]))


def stores_in_bulk(kernel: AnnotatedKernel) -> bool:
    """Whether a tile is stored through a descriptor: such stores must be complete before anything is announced, be it
    only the alarm."""
    language = kernel.source.language
    calls = [call for store in kernel.stores for call in accesses_in(store.statement, "store", language)]
    return any(language.method(call) for call in calls)


def _factor(extent: Polynomial) -> str:
    return text_of(extent) if len(extent.terms) == 1 else f"({text_of(extent)})"


def _waited(row: str) -> str:
    return f"{LANG}.wait_for_tile(\n    overweave_table, {row}, {_WAITED}\n)"


def _bounded(end: str, bound: cst.Arg) -> cst.CSTNode:
    """`overweave_low = part_low(..., LOW)`, where LOW is what the author's loop begins with; or its end."""
    line = cst.parse_statement(f"overweave_{end} = {LANG}.part_{end}(overweave_table, overweave_here, 0)")
    assert isinstance(line, cst.SimpleStatementLine)
    assigned = line.body[0]
    assert isinstance(assigned, cst.Assign)
    assert isinstance(assigned.value, cst.Call)
    call = assigned.value.with_changes(args=(*assigned.value.args[:2], cst.Arg(bound.value)))
    return line.with_changes(body=(assigned.with_changes(value=call),))


def _begun(regions: tuple[tuple[int, int], ...], index: int) -> tuple[int, int] | None:
    """The dispatch region that begins with a statement."""
    return next((region for region in regions if region[0] == index), None)


class _Numbering(cst.CSTTransformer):
    """A tile's number from the table, where the author asks for the program's."""

    def __init__(self, kernel: AnnotatedKernel) -> None:
        super().__init__()
        self.language = kernel.source.language

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        numbered = f"{LANG}.tile_number(overweave_table, overweave_row)"
        return cst.parse_expression(numbered) if self.language.word(original_node) == "program_id" else updated_node


class _Storing(cst.CSTTransformer):
    """Lets annotated stores write NaN if a wait was void, and those of one tensor store at all of the tile's places."""

    def __init__(self, kernel: AnnotatedKernel, away: str | None, is_voided: bool) -> None:
        super().__init__()
        self.is_voided = is_voided
        self.calls = [
            (store, call)
            for store in kernel.stores
            for call in accesses_in(store.statement, "store", kernel.source.language)
        ]
        self.away = [store for store in kernel.stores if store.directive.tensor == away]

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        store = next((store for store, call in self.calls if call is original_node), None)
        if store is None:
            return updated_node
        args = list(updated_node.args)
        if self.is_voided:
            at = next(at for at, arg in enumerate(args) if is_value(at, arg))
            args[at] = args[at].with_changes(value=_voided(args[at].value))
        if any(store is one for one in self.away):
            at = next((at for at, arg in enumerate(args) if arg.keyword and arg.keyword.value == "pointer"), 0)
            args[at] = args[at].with_changes(value=_moved(args[at].value))
        return updated_node.with_changes(args=args)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """The store stands in a loop over the places, and nothing else does: it may stand in a loop itself."""
        store = next((one for one in self.away if one.statement is original_node), None)
        if store is None:
            return updated_node
        table, rest = "overweave_table, overweave_row, overweave_places", "overweave_world_size"
        count = _parse(f"overweave_count = {LANG}.place_count({table}, {rest})")
        loop = _parse("for overweave_place in range(overweave_count):\n    pass\n")
        pointer = store.directive.parameter
        away = _parse(f"overweave_away = {LANG}.away(\n    {table}, overweave_place, {rest}, {pointer}\n)")
        assert isinstance(loop, cst.For)
        stored = updated_node.with_changes(leading_lines=())
        made = [count, loop.with_changes(body=loop.body.with_changes(body=(away, stored)))]
        return cst.FlattenSentinel(_led(made, original_node))  # type: ignore[arg-type]


def _voided(value: cst.BaseExpression) -> cst.Call:
    return cst.Call(
        func=cst.parse_expression(f"{LANG}.voided"),
        args=(
            cst.Arg(value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))),
            cst.Arg(cst.Name("overweave_verdict")),
        ),
    )


def _moved(pointers: cst.BaseExpression) -> cst.BinaryOperation:
    """Pointers, and how far away a tile is stored."""
    is_plain = isinstance(pointers, cst.Name) or bool(pointers.lpar)
    left = pointers if is_plain else pointers.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.BinaryOperation(left, cst.Add(), cst.Name("overweave_away"))


def _persistent(kernel: AnnotatedKernel, body: list[cst.CSTNode]) -> list[cst.CSTNode]:
    """The author's loop over tiles as one that claims them."""
    assert kernel.loop is not None
    loop = kernel.source.function.body.body[kernel.loop]
    claim = _parse(f"overweave_row = {LANG}.claim_tile(overweave_claims)")
    turn = _parse("while overweave_row < overweave_tiles:\n    pass\n")
    assert isinstance(turn, cst.While)
    assert isinstance(loop, cst.For)
    numbered = _parse(f"{kernel.number} = {LANG}.tile_number(overweave_table, overweave_row)")
    block = loop.body.with_changes(body=(numbered, *body, claim))
    return _led([claim, turn.with_changes(body=block)], loop)


def _with_protocol(params: cst.Parameters, added: tuple[str, ...]) -> cst.Parameters:
    """The protocol's parameters stand before the first constant, or the first that has a default."""
    listed = list(params.params)
    at = next((i for i, one in enumerate(listed) if one.default or is_constant(one)), len(listed))
    style = listed[0].comma if listed and isinstance(listed[0].comma, cst.Comma) else cst.MaybeSentinel.DEFAULT
    listed[at:at] = [cst.Param(cst.Name(name), comma=style) for name in added]
    return params.with_changes(params=listed)


def _led(made: list[cst.CSTNode], by: Statement) -> list[cst.CSTNode]:
    """The statements, the first of which takes over the comments above the one that they replace."""
    lines = by.leading_lines if isinstance(by, cst.SimpleStatementLine | cst.For) else ()
    return [made[0].with_changes(leading_lines=lines), *made[1:]]


def _parse(text: str) -> cst.CSTNode:
    return cst.parse_statement(text)
