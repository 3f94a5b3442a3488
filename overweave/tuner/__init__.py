"""Which Plan a Problem gets: the space of candidates, the model, measurements, and what was kept of them."""
