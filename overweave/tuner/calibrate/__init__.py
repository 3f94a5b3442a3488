"""A machine file measured on the GPU at hand: samples of small steps, rates of memory and tiles, and the file."""
