"""Styles for torch's `parallelize_module`: tensor-parallel plans whose collectives run beside their matmuls."""
