"""The grammar of a Schedule's text form, as data that both the parser and the printer read.

    schedule all_gather_matmul.push world_size=2 version=1
    buffer x [64, 32] input
    pad arrived [2]
    queue tiles issue after main
    credits 0 -> 1
    given x@0[0:64,0:32] = a[0,0]
    goal y@0[0:128,0:16] = a@b[0,0] sum 0:32
    rank 0
      copies push.0-1.0: put x@0[0:64,0:32] -> gathered@1[0:64,0:32] signal arrived@1[0]
      tiles multiply.0-1.0: matmul gathered@0[64:128,0:32] @ w@0[0:32,0:16] -> y@0[64:128,0:16] wait arrived[1:2]>=1

A buffer whose blocks are permuted says their shape, and the cell of each block: `local blocks 64x32 at 2 0 1 3`; and
the row at which each begins, if these are not multiples of the height: `tops 0 50`.
`counted sent` or `counted received` marks a buffer of which calls fill only the first rows of each block.
Blanks separate words. `rank` names the rank of the operations below it, which are in launch order.
`reuse echoes` replaces credits. `+->` accumulates. A matmul with addends shows the sum that it computes,
`p + a @ b + q -> out`; `late` precedes the waits of the addends alone, `scaled` the factors by which the rows of the
product are scaled. A sum in any order says `order=any`, and its goal `sum any 0:32 32:64`.
A sum to which the epilogue is applied says `then=finished`; its result is the tensor `a@b.finished`.
An `apply` names the contents of each region, `REGION=TENSOR[ROW,COL]`, and after `/` the terms of a sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, NamedTuple

from msgspec.structs import asdict

VERSION = 1
MAX_BYTES = 32 * 2**20
ADD = "+"
FieldValues = dict[str, Any]  # field -> value of a record, before msgspec converts it


class ParseError(Exception):
    """Raised for a line, or a word in it, that cannot be read."""


class TextForm:
    """A word or a line with the fields of a record, from a template such as `{pad}@{rank:d}[{signal:d}]`.

    Fields are names or, with `:d`, integers. `show` prints a record, `read` parses the text into its fields.
    """

    def __init__(self, template: str) -> None:
        self._template, self._fields, pattern = template, [], ""
        for literal, field, kind, _ in Formatter().parse(template):
            pattern += re.escape(literal)
            if field is not None:
                self._fields.append((re.findall(r"\w+", field), kind == "d"))
                pattern += "([0-9]{1,10})" if kind == "d" else r"([A-Za-z_][A-Za-z0-9_.@+-]{0,63})"
        self._pattern = re.compile(pattern)

    def show(self, value: Any) -> str:
        return self._template.format(**asdict(value))

    def read(self, text: str) -> FieldValues:
        """Parse the text into fields, nested as the template names them. Raises ParseError."""
        match = self._pattern.fullmatch(text)
        if match is None:
            raise ParseError(f"cannot read {text[:60]!r}")
        parts: FieldValues = {}
        for ((*path, last), is_number), group in zip(self._fields, match.groups(), strict=True):
            value, at = int(group) if is_number else group, parts
            for name in path[:-1] if last.isdigit() else path:
                at = at.setdefault(name, {})
            if last.isdigit():  # of a range
                at.setdefault(path[-1], []).append(value)
            else:
                at[last] = value
        return parts


_REGION_TEMPLATE = (
    "{region.buffer}@{region.rank:d}[{region.rows[0]:d}:{region.rows[1]:d},{region.cols[0]:d}:{region.cols[1]:d}]"
)
_TENSOR_OFFSET = "{tensor}[{row:d},{col:d}]"
REGION = TextForm(_REGION_TEMPLATE.replace("region.", ""))
WAIT = TextForm("{pad}[{signals[0]:d}:{signals[1]:d}]>={count:d}")
NOTIFY = TextForm("{pad}@{rank:d}[{signal:d}]")
CONTENT = TextForm(f"{_REGION_TEMPLATE}={_TENSOR_OFFSET}")
SCHEDULE = TextForm("schedule {name} world_size={world_size:d} version={version:d}")
BUFFER = TextForm("buffer {name} [{rows:d}, {cols:d}] {home}")
BLOCKS = TextForm("{rows:d}x{cols:d}")
PAD = TextForm("pad {name} [{size:d}]")
QUEUE = TextForm("queue {name} {order}")
REUSE = TextForm("reuse {reuse}")
GIVEN = TextForm(f"given {_REGION_TEMPLATE} = {_TENSOR_OFFSET}")
GOAL = TextForm(f"goal {_REGION_TEMPLATE} = {_TENSOR_OFFSET}")
RANK = TextForm("rank {rank:d}")
_NUMBER, _RANGE = TextForm("{number:d}"), TextForm("{range[0]:d}:{range[1]:d}")


def number(word: str) -> int:
    """Parse an integer. Raises ParseError."""
    return int(_NUMBER.read(word)["number"])


def numbers(words: str) -> list[int]:
    """Parse integers such as `1,0`. Raises ParseError."""
    return [number(word) for word in words.split(",") if word]


def range_text(interval: Sequence[int]) -> str:
    return f"{interval[0]}:{interval[1]}"


def ranges(words: Sequence[str]) -> list[list[int]]:
    """Parse ranges such as `0:5 5:9`. Raises ParseError."""
    return [_RANGE.read(word)["range"] for word in words]


def content_text(content: Any) -> str:
    """Print an InitialContents or a Goal of an Apply: `REGION=TENSOR[ROW,COL]`, and `/` with the terms of a sum."""
    terms = ",".join(map(range_text, getattr(content, "terms", ())))
    return CONTENT.show(content) + (f"/{terms}" if terms else "")


def read_content(word: str) -> FieldValues:
    """Parse what `content_text` prints. Only a Goal may have terms, which msgspec checks. Raises ParseError."""
    value, slash, terms = word.partition("/")
    return CONTENT.read(value) | ({"terms": ranges(terms.split(","))} if slash else {})


class WordListField(NamedTuple):
    """A field of an operation that is a list of words after a mark, such as `->`; "": the words before any mark.

    shown_with: the mark is printed even without words if the field `shown_with` has any. between: the separator of
    values. is_one: one word instead of a list.
    """

    mark: str
    field: str
    show: Callable[[Any], str] = REGION.show
    read: Callable[[str], Any] = REGION.read
    shown_with: str = ""
    between: str = ""
    is_one: bool = False


class KeyValueField(NamedTuple):
    """A field of an operation that is printed as `key=value`, and left out if it is the default."""

    key: str
    field: str
    show: Callable[[Any], str] = str
    read: Callable[[str], Any] = number
    default: object = None


def _flag(key: str, field: str, word: str) -> KeyValueField:
    """Return the form of a boolean field, which is true if the line contains `key=word`."""

    def read(value: str) -> bool:
        if value != word:
            raise ParseError(f"{key}={value[:20]}; it can only be {key}={word}")
        return True

    return KeyValueField(key, field, lambda is_so: word, read, default=False)


_TILES, _THEN = KeyValueField("tiles", "tiles", default=1), _flag("then", "finishes", "finished")
_TRANSFER = WordListField("", "sources"), WordListField("->", "destinations", shown_with="sources")
_LATE = WordListField("late", "late_waits", WAIT.show, WAIT.read)
_COLLECTIVE = (
    KeyValueField("label", "label", read=str),
    KeyValueField("ranks", "ranks", lambda ranks: ",".join(map(str, ranks)), numbers),
    *_TRANSFER,
    _THEN,
)
# The fields of each operation, in the order of the line. A matmul's operands and results precede them (parse.py).
VERBS: dict[str, tuple[WordListField | KeyValueField, ...]] = {
    "put": (*_TRANSFER, _TILES),
    "get": _TRANSFER,
    "reduce_put": (*_TRANSFER, _TILES, _flag("order", "unordered", "any")),
    "clear": _TRANSFER,
    "retire": (WordListField("", "regions"),),
    "copy": (KeyValueField("delay_us", "delay_us", default=0), *_TRANSFER),
    "matmul": (WordListField("and", "copies"), _TILES, _THEN, WordListField("scaled", "scales"), _LATE),
    "reduce": (WordListField("", "operands", between=ADD), WordListField("->", "out", is_one=True), _TILES, _THEN),
    "apply": (
        KeyValueField("function", "function", read=str),
        WordListField("", "needs", content_text, read_content),
        WordListField("->", "makes", content_text, read_content, shown_with="name"),
        KeyValueField(
            "tiles", "tiles", lambda tiles: ",".join(map(range_text, tiles)), lambda tiles: ranges(tiles.split(","))
        ),
        WordListField("reads", "late_needs", content_text, read_content),
        _LATE,
    ),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), _COLLECTIVE),
}
SIGNALS = (
    WordListField("wait", "waits", WAIT.show, WAIT.read),
    WordListField("signal", "notifies", NOTIFY.show, NOTIFY.read),
)
