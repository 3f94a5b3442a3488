"""What a method is: its record, its options, who carries what moves, and what it needs."""
