"""A module as a graph of ATen operations: called with flat tensors, captured, cut into segments, written as files."""
