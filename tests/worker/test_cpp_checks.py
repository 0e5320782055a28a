"""Checks in generated C++: those of kernels are noted, those of templates stay."""

import unittest

from .support import part

SOURCE = """\
#include <torch/csrc/inductor/cpp_prefix.h>
template <bool add> inline void product(int n)
{
    AOTI_TORCH_CHECK(n % 16 == 0, "columns");
}

extern "C"  void cpp_fused_embedding_0(const int64_t* ids,
                       float* out)
{
    #pragma omp parallel num_threads(2)
    {
        {
            AOTI_TORCH_CHECK((id < 3L), "index in 0..3");
        }
    }
}
"""


class CppChecksTest(unittest.TestCase):
    def test_checks_of_kernels_are_noted_and_those_of_templates_stay(self) -> None:
        note_in = part("torch_private.cpp_checks").note_in
        text = note_in(SOURCE)
        self.assertIn('    AOTI_TORCH_CHECK(n % 16 == 0, "columns");\n', text)
        kernel = text[text.index("void cpp_fused_embedding_0") :]
        noted = "{\n    const char** const precast_noted = &precast_failed_check;\n    #pragma omp parallel"
        self.assertIn(noted, kernel)
        self.assertIn('PRECAST_CHECK((id < 3L), "index in 0..3");', kernel)
        self.assertNotIn("AOTI_TORCH_CHECK", kernel)
        # Inductor compiles a file again where the same kernels come again.
        self.assertEqual(note_in(text), text)

    def test_a_source_without_kernels_is_left_as_it_is(self) -> None:
        text = SOURCE[: SOURCE.index('extern "C"')]
        self.assertEqual(part("torch_private.cpp_checks").note_in(text), text)
