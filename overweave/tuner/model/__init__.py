"""The choice: by measurement, by the model, or by a rule of size, with its reasons."""
