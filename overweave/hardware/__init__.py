"""Descriptions of machines: rates, latencies and links of GPUs, and the files of measured machines."""
