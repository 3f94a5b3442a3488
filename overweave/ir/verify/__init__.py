"""Proofs: that a Schedule cannot hang, race, leave a gap or outlive its slot, and that a Plan fits its machine."""
