"""How a plan is launched: which streams its queues run on, in which order, and what streams alone wait for."""
