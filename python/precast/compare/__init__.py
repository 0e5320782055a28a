"""Comparisons of compiled modules with the modules themselves, and the rounding of eager."""
