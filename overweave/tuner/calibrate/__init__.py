"""Calibration: samples of a call's small steps, rates of memory and tiles, and the machine file made of them."""
