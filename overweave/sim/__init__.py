"""What a Plan costs: of single things (cost.py), and of the whole call, event by event (simulate.py)."""
