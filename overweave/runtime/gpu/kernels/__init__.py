"""How each kernel is launched: what it is given, and the cached handle that starts it."""
