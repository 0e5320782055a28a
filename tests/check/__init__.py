"""Tests of `precast check`: seeded faults, each found at its line, and models without any."""
