"""Styles for torch's `parallelize_module`: tensor-parallel plans whose collectives overlap with their matmuls."""
