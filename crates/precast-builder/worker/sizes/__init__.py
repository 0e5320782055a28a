"""Sizes that a program answers: dynamic dimensions, padding, and sizes of outputs."""
