"""What changes in a split when a kernel carries its Puts: how large its tiles are, and behind what it is launched."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import COPY_ENGINE, LIBRARY, CopyConfig, DataPath, MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.communication import Split
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.moves import Written, movers_in
from overweave.schedules.records.options import Settings
from overweave.schedules.tiles.shape import count_tiles

# A tile ends in a release to its peer, whose way there and back should be short beside its bytes; and every program
# should have a few, so that all end together.
LEAST_TILE_BYTES, MOST_TILE_BYTES = 16 << 10, 128 << 10
TILES_PER_PROGRAM = 2
PATHS: dict[str, DataPath] = {"copy_kernel": "load_store", "bulk_kernel": "bulk"}


def carried(split: Split, problem: Problem, cols: int, settings: Settings, config: MatmulConfig | None) -> Split:
    """The split as `settings.mover` carries it. cols: of the rows that move."""
    if settings.mover in (COPY_ENGINE, LIBRARY):
        return replace(split, mover=settings.mover)
    row_bytes = cols * ITEMSIZE_BYTES[problem.moved_dtype]
    moved_bytes = (split.world_size - 1) * split.shard_size * row_bytes
    tile_bytes = moved_bytes // (TILES_PER_PROGRAM * settings.copy_programs)
    tile_bytes = min(max(tile_bytes, LEAST_TILE_BYTES), MOST_TILE_BYTES)
    heights = (hi - lo for lo, hi in map(split.shard, range(split.world_size)))
    is_one_wave = config is None or count_tiles(heights, problem.widths, config).tiles <= settings.sms
    return replace(split, mover=settings.mover, tile_rows=max(1, tile_bytes // row_bytes), is_one_wave=is_one_wave)


def copy_config(settings: Settings) -> CopyConfig | None:
    """The launch of the kernel that carries Puts, if one does."""
    path = PATHS.get(settings.mover)
    return CopyConfig(programs=settings.copy_programs, path=path) if path else None


def by_hand_config(written: Written) -> CopyConfig | None:
    """The same of a list of moves. Raises InputError for two kernels."""
    paths = [PATHS[mover] for mover in sorted(movers_in(written)) if mover in PATHS]
    if len(paths) > 1:
        raise InputError(f"move {written}", "one move by copy_kernel, one by bulk_kernel", "One kernel moves chunks")
    return CopyConfig(programs=written.copy_programs, path=paths[0]) if paths else None


# The mesh of a split: what the options of a schedule say of chunks and of how ranks lie.


def mesh_of(split: Split, problem: Problem, settings: Settings) -> Mesh:
    """Chunks begin where the split's pieces do. Islands are the problem's, if it names any."""
    return Mesh(
        **asdict(split),
        cols=problem.moved_columns,
        col_pieces=settings.col_pieces,
        island=settings.island,
        members=problem.islands or (),
        carrier=settings.carrier or COPY_ENGINE,
        axis=settings.axis,
        lanes=settings.lanes,
        copy_programs=settings.copy_programs,
    )
