"""What an outside race detector sees of the device protocol: programs of our copy kernel, right and broken."""
