"""Exchanges by packed messages, whose flags travel with the data."""
