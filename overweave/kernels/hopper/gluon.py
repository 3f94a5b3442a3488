"""Names of Gluon that move between Triton versions: the one place that knows them. 3.9 renames the copies of 3.6."""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_stores_read = tma.store_wait

__all__ = ["load_tile", "mbarrier", "store_tile", "wait_for_stores_read"]
