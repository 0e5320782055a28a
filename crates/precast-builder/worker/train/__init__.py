"""Training steps, and pairs of a forward and a backward program."""
