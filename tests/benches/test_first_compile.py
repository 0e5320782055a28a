"""The counts of the profile of a first compile."""

from __future__ import annotations

import types
import unittest

from benches.first_compile import Profile, cpu


def burn(seconds: float) -> None:
    end = cpu() + seconds
    while cpu() < end:
        pass


class Parts(unittest.TestCase):
    def test_the_outermost_function_gets_all_that_it_calls(self) -> None:
        tools = types.SimpleNamespace()
        tools.compile = lambda: burn(0.1)
        tools.header = lambda: tools.compile()
        profile = Profile()
        profile.watch(tools, "header", "headers")
        profile.watch(tools, "compile", "C++")
        tools.header()
        self.assertEqual(list(profile.take()), ["headers"])
        tools.compile()
        spent = profile.take()
        self.assertEqual(list(spent), ["C++"])
        self.assertGreaterEqual(spent["C++"], 0.1)
        self.assertEqual(profile.take(), {})

    def test_a_function_that_raises_is_counted(self) -> None:
        def fails() -> None:
            raise OSError

        tools = types.SimpleNamespace(run=fails)
        profile = Profile()
        profile.watch(tools, "run", "C++")
        for _ in range(2):
            self.assertRaises(OSError, tools.run)
        self.assertEqual(list(profile.take()), ["C++"])


if __name__ == "__main__":
    unittest.main()
