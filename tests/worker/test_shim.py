"""The shim: compiled once for its sources, the same bytes in any folder, and an error where it does not compile."""

from __future__ import annotations

import os
import subprocess
import unittest.mock
from pathlib import Path

from .support import Project, Quiet, part, static_compiler

SOURCES = {"shim_cpu.cpp": '#include "one.h"\nextern "C" int one() { return ONE; }', "one.h": "#define ONE 1"}


class Shim(Project):
    """Small sources: that the shim's own compile shows every test that loads an artifact."""

    def compiled(self, headers: str, **changed: str) -> tuple[bytes, list[str]]:
        """Returns the shared object, and the phases that were reported."""
        wire, out = Quiet(), self.out / f"{headers}-out"
        out.mkdir(exist_ok=True)
        with unittest.mock.patch.dict(os.environ, {"PRECAST_HEADER_DIR": str(self.root / headers)}):
            answer = part("torch_private.cpp_shim").compile_shim({**SOURCES, **changed}, "cpu", out, wire.event)
        self.assertIsNone(answer["cuda"])
        return Path(answer["file"]).read_bytes(), wire.phases

    def test_it_is_compiled_once(self) -> None:
        first, phases = self.compiled("headers")
        self.assertEqual(phases, ["cpp"])
        self.assertEqual(self.compiled("headers"), (first, []))
        other, phases = self.compiled("headers", **{"one.h": "#define ONE 2"})
        self.assertEqual(phases, ["cpp"])
        self.assertNotEqual(other, first)

    def test_it_has_the_same_bytes_in_any_folder(self) -> None:
        first, _ = self.compiled("headers")
        self.assertEqual(self.compiled("other")[0], first)
        self.assertNotIn(str(self.root).encode(), first)

    def test_the_cpp_library_is_the_one_of_torch_whatever_the_compiler_links(self) -> None:
        text = '#include <locale>\nextern "C" int one() { return std::locale::classic() == std::locale(); }'
        with unittest.mock.patch.dict(os.environ, static_compiler(self.root)):
            found, _ = self.compiled("headers", **{"shim_cpu.cpp": text})
        self.assertIn(b"libstdc++.so", found)
        path = self.root / "found.so"
        path.write_bytes(found)
        symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
        self.assertIn(" T one\n", symbols)
        self.assertRegex(symbols, r" U _ZNSt6locale7classicEv\b")

    def test_one_that_does_not_compile_is_an_error(self) -> None:
        session = unittest.mock.Mock(wire=Quiet())
        broken = {**SOURCES, "one.h": "#define ONE nothing"}
        request = {"sources": broken, "device": "cpu", "out": str(self.out)}
        failure = self.fails("shim", part("serve").OPERATIONS["shim"], session, request)
        self.assertTrue(failure.message.startswith("the shim `shim_cpu.cpp` does not compile: "), failure.message)
        self.assertIn("nothing", failure.message)
