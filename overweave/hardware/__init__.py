"""What machines give: frozen descriptions, and the machines that were measured."""
