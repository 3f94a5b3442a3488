"""What a call costs the host, counted without a GPU and timed on one."""
