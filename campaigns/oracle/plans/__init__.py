"""Plans, broken and run on a modelled GPU: what verify accepts must end, be in order and bind."""
