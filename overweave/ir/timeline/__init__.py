"""What ran when: timelines of all ranks, and their export as traces."""
