"""The tuner: which Plan a Problem gets, by the space of candidates, the model, measurements, and their cache."""
