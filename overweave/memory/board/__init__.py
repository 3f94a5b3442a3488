"""The shared-memory control block of the ranks of one host, and the alarm of a failed call."""
