"""The cost of a Plan: of single operations (cost.py), and of the whole call, event by event (simulate.py)."""
