"""The judges of verify: mutations, lost waits, and runs of every interleaving."""
