"""What tiles of a matmul and of an attention touch, as directives of authors' kernels say it."""

from __future__ import annotations

from overweave.ir.footprint import Axis, Dim, Operand, TileSpace

BLOCK = 16


def matmul(m: int, n: int = 48, k: int = 32, block: tuple[int, int] = (BLOCK, BLOCK)) -> TileSpace:
    return TileSpace(
        "matmul",
        (Axis("M", m, block[0]), Axis("N", n, block[1])),
        loads=(Operand("A", "a", (Dim(m, "M"), Dim(k))), Operand("B", "b", (Dim(n, "N"), Dim(k)))),
        stores=(Operand("C", "c", (Dim(m, "M"), Dim(n, "N"))),),
    )


def attention(
    length: int, width: int = 8, queries: int = 32, heads: int = 2, block: tuple[int, int] = (BLOCK, BLOCK)
) -> TileSpace:
    """Keys and values are streamed. block: of queries and of keys."""
    sides = tuple(Operand(name, name.lower(), (Dim(length, "S"), Dim(heads, "H"), Dim(width))) for name in ("K", "V"))
    return TileSpace(
        "attention",
        (Axis("Q", queries, block[0]), Axis("H", heads, 1), Axis("S", length, block[1], is_streamed=True)),
        loads=sides,
        stores=(Operand("O", "out", (Dim(queries, "Q"), Dim(heads, "H"), Dim(width))),),
    )
