"""Tests of the Python worker: `python -m unittest discover -s tests/worker -t .` with the environment's Python."""
