"""Real compiles: an artifact takes any weights, and only the instructions it was allowed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

import torch

from .artifact import agrees, run
from .support import ROOT, Project, Quiet, long, model, part, static_compiler

# Every weight here has a value that a compiler likes to fold: ones, zeros, tensors of one element, scalars.
MODEL = model(
    """\
h = self.linear(self.norm(x))[:, self.order] * self.scale + self.shift
return self.one(torch.tanh(h)), h[:, :3] * self.small, h.t()""",
    """\
self.norm = torch.nn.LayerNorm(8)
self.linear, self.one = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
torch.nn.init.zeros_(self.linear.bias)
torch.nn.init.zeros_(self.linear.weight)
self.scale, self.shift = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.zeros(1))
self.register_buffer("small", torch.ones(3))
self.register_buffer("order", torch.tensor([3, 1, 2, 0, 4, 5, 6, 7]))""",
)

# A product with a weight, and two products of activations.
ATTENTION = model(
    "h = self.linear(x)\nreturn torch.softmax(h @ h.transpose(1, 2), -1) @ h", "self.linear = torch.nn.Linear(32, 64)"
)

SCALED = model(
    "q, k, v = self.linear(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)\n"
    "return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "self.linear = torch.nn.Linear(32, 96)",
)
SCALED += "\ndef half():\n    return Model().to(torch.bfloat16)\n"

# One kernel that is worth several threads.
WIDE = model("return torch.tanh(x) * x.sum()")

CONVOLUTION = model(
    "h = torch.relu(self.norm(self.conv(x))).mean((2, 3))\nreturn self.linear(h), self.small(h), self.linear.bias",
    "self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)\n"
    "self.linear, self.small = torch.nn.Linear(8, 1 << 16), torch.nn.Linear(8, 6)",
)

ATTENTION_INPUTS = model(
    "return self.query(x).sin(), self.key(x).sin(), self.value(x).sin()",
    "self.query, self.key, self.value = (torch.nn.Linear(384, 384) for _ in range(3))",
)

# Loads a library where no memory may become executable; 75 where the kernel can't forbid it.
UNDER_MDWE = """
import ctypes, sys, torch

process = ctypes.CDLL(None)
if process.prctl(65, 1, 0, 0, 0) != 0:
    sys.exit(75)
ctypes.CDLL(sys.argv[1])
"""


def follow(recipe: dict[str, Any], constants: dict[str, Any]) -> Any:
    from torch._export.serde import serialize

    def value(argument: dict[str, Any]) -> Any:
        ((kind, held),) = argument.items()
        special = {
            "constant": lambda: constants[held],
            "call": lambda: follow(held, constants),
            "tensors": lambda: [value(one) for one in held],
            "scalar_type": lambda: serialize._SERIALIZE_TO_TORCH_DTYPE[held],
            "memory_format": lambda: serialize._SERIALIZE_TO_TORCH_MEMORY_FORMAT[held],
        }
        return special[kind]() if kind in special else held

    space, _, name = recipe["operator"].partition("::")
    name, _, overload = name.partition(".")
    operator = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    named = {argument: value(given) for argument, given in recipe["arguments"]}
    return operator(**named)


def cuda() -> bool:
    return torch.cuda.is_available()


class CompileTest(Project):
    def small(self) -> dict[str, Any]:
        return self.capture(self.open(MODEL), inputs=[("x", "float32", [4, 8])])

    def headers(self) -> dict[str, int]:
        """Returns the files of the test's own folder of headers, with the times of their last changes."""
        return {path.name: path.stat().st_mtime_ns for path in (self.out / "own").iterdir()}

    def test_an_artifact_holds_no_values_of_weights(self) -> None:
        opened = self.open(MODEL)
        captured = self.capture(opened, inputs=[("x", "float32", [4, 8], ["n", None])], sizes={"n": 4})
        answer = self.compile(captured, "native")
        self.assertEqual(answer["metadata"]["AOTI_DEVICE_KEY"], "cpu")
        self.assertIsNone(answer["proxy"])
        self.assertLess({"load", "lower", "cpp", "link"} - set(answer["seconds"]), {"headers"})
        self.check_what_it_asks_of_the_loader(answer["library"])
        samples = self.samples(captured)
        for change in (False, True):
            if change:
                with torch.no_grad():
                    for parameter in opened.model.parameters():
                        parameter.copy_(torch.randn(parameter.shape))
                    opened.model.small.copy_(torch.randn(3))
            weights = self.bound(captured, self.weights(opened))
            results = run(answer["library"], "cpu", weights, [samples["in.0"]], 3)
            with torch.inference_mode():
                expected = opened.model(samples["in.0"])
            for result, wanted, output in zip(results, expected, captured["outputs"], strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
                self.assertEqual(part("tensors").layout(result)["stride"], output["stride"])
        # The same text compiled for a baseline uses nothing beyond it.
        answer = self.compile(captured, "baseline", isa="x86-64-v3")
        code = subprocess.run(["objdump", "-d", answer["library"]], capture_output=True, text=True, check=True).stdout
        self.assertIn("ymm", code)
        self.assertNotIn("zmm", code)
        results = run(answer["library"], "cpu", weights, [samples["in.0"]], 3)
        torch.testing.assert_close(results[0], expected[0], rtol=1e-5, atol=1e-6)

    def check_what_it_asks_of_the_loader(self, library: str) -> None:
        """No executable stack, and nothing else that a process under `PR_SET_MDWE` can't load."""
        headers = subprocess.run(["readelf", "-lW", library], capture_output=True, text=True, check=True).stdout
        flags = {line.split()[-2] for line in headers.splitlines() if line.split()[:1] == ["GNU_STACK"]}
        self.assertEqual(flags, {"RW"})
        done = subprocess.run(
            [sys.executable, "-I", "-c", UNDER_MDWE, library], capture_output=True, text=True, check=False
        )
        if done.returncode == 75:
            print("skipped: this kernel has no PR_SET_MDWE", file=sys.stderr)
            return
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_freezing_says_how_weights_are_made_into_what_kernels_read(self) -> None:
        opened = self.open(CONVOLUTION)
        texts = []
        for index, batch in enumerate((2, 4)):
            captured = self.capture(opened, inputs=[("x", "float32", [batch, 3, 16, 16])])
            answer = self.compile(captured, f"frozen{index}", options={"freezing": True})
            code = self.wrapper(f"frozen{index}")
            self.assertNotIn("aoti_torch_cpu_convolution", code)
            self.assertEqual(code.count("aoti_torch_cpu_addmm_out("), 1, "one product is too small to be packed")
            texts.append([made["call"] for made in answer["prepared"]])
            by_shape = {(*made["shape"],): made for made in answer["prepared"]}
            # The filter, the bias that the batch norm became, and the matrices.
            self.assertEqual(set(by_shape), {(8, 3, 3, 3), (8,), (1 << 16, 8), (8, 6)})
            self.assertEqual([by_shape[(8, 3, 3, 3)]["stride"], by_shape[(1 << 16, 8)]["stride"]], [None, None])
            self.assertEqual(by_shape[(8, 6)]["stride"], [1, 8], "a view")
        self.assertEqual(texts[0], texts[1], "two buckets can't share what is made")

        # For other weights, the recipes give the results of the convolution and its batch norm.
        held = self.weights(opened)
        weights = {name: torch.rand_like(held[tensor]) for name, tensor in captured["steps"][0]["binding"].items()}
        names = {tensor: name for name, tensor in captured["steps"][0]["binding"].items()}
        with torch.inference_mode():
            filters, bias = (follow(by_shape[shape]["call"], weights) for shape in ((8, 3, 3, 3), (8,)))
            x = torch.randn(4, 3, 16, 16)
            got = torch.nn.functional.conv2d(x, filters.to_dense(), bias, padding=1)
            state = [weights[names[f"norm.{part}"]] for part in ("running_mean", "running_var", "weight", "bias")]
            plain = torch.nn.functional.conv2d(x, weights[names["conv.weight"]], padding=1)
            wanted = torch.nn.functional.batch_norm(plain, *state)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    def test_matrices_that_multiply_the_same_rows_are_laid_out_as_one(self) -> None:
        opened = self.open(ATTENTION_INPUTS)
        captured = self.capture(opened, inputs=[("x", "float32", [64, 384])])
        for options, calls in (({}, 1), ({"cpp.enable_concat_linear": False}, 3)):
            name = f"one{calls}"
            answer = self.compile(captured, name, options={"freezing": True, **options})
            code = self.wrapper(name)
            self.assertEqual(code.count("(aoti_torch_cpu__linear_pointwise("), calls)
            shapes = sorted(made["shape"] for made in answer["prepared"])
            self.assertEqual(shapes, [[1152], [1152, 384]] if calls == 1 else [[384, 384]] * 3)
            if calls == 1:
                held = self.weights(opened)
                weights = self.bound(captured, held)
                made = {(*made["shape"],): follow(made["call"], weights) for made in answer["prepared"]}
                x = torch.randn(32, 384)
                got = torch.nn.functional.linear(x, made[(1152, 384)].to_dense(), made[(1152,)])
                wanted = [
                    torch.nn.functional.linear(x, held[f"{part}.weight"], held[f"{part}.bias"])
                    for part in ("query", "key", "value")
                ]
                # In whichever order the compiler has taken them.
                for one in got.split(384, dim=1):
                    self.assertTrue(any(one.allclose(other, rtol=1e-4, atol=1e-4) for other in wanted))

    def test_a_bucket_of_one_row_keeps_its_weights_as_they_are(self) -> None:
        opened, prepacked = self.open(ATTENTION_INPUTS), part("passes.prepacked")
        for rows in (1, 2, 4):
            captured = self.capture(opened, inputs=[("x", "float32", [rows, 384])])
            module, _, _ = part("graph.segment").load(Path(captured["segments"][0]["file"]), "cpu")
            self.assertEqual(prepacked.is_faster(module), rows > 2)
            if rows == 1:
                answer = self.compile(captured, "row", options={"freezing": True})
                self.assertEqual(answer["prepared"], [])
        captured = self.capture(self.open(CONVOLUTION), inputs=[("x", "float32", [1, 3, 16, 16])])
        module, _, _ = part("graph.segment").load(Path(captured["segments"][0]["file"]), "cpu")
        self.assertTrue(prepacked.is_faster(module), "batch norms are folded into filters")

    def test_what_the_passes_for_weights_fail_at_is_compiled_without_them(self) -> None:
        captured = self.small()
        stderr = io.StringIO()
        failing = unittest.mock.patch.object(
            part("passes.prepacked"), "_fold", side_effect=RuntimeError("no such filter")
        )
        with failing, contextlib.redirect_stderr(stderr):
            answer = self.compile(captured, "plain", options={"freezing": True})
        self.assertEqual(answer["prepared"], [])
        self.assertTrue(Path(answer["library"]).is_file())
        self.assertIn("weights are not prepacked: RuntimeError: no such filter\n", stderr.getvalue())

    @long
    def test_headers_are_made_once_and_begun_before_the_rest_of_the_compiler_is_imported(self) -> None:
        captured, own = self.small(), {"PRECAST_HEADER_DIR": str(self.out / "own")}
        code = """
import importlib, json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
worker = os.path.basename(sys.argv[1])
inductor = importlib.import_module(worker + ".torch_private.inductor")
begin = inductor.begin

def noting(*args):
    begun, later = begin(*args), ("compile_fx", "graph", "lowering")
    print(json.dumps([name for name in later if "torch._inductor." + name in sys.modules]))
    return begun

inductor.begin = noting
compiler = importlib.import_module(worker + ".compiler")
wire = type("Wire", (), {"event": lambda self, phase: None})()
compiler.warm_up({"device": "cpu", "isa": "native"}, compiler.Path(sys.argv[2]), wire)
"""
        worker = Path(part("compiler").__file__).parent
        command = [sys.executable, "-P", "-c", code, str(worker), str(self.out / "first")]
        done = subprocess.run(command, env={**os.environ, **own}, stdout=subprocess.PIPE, check=True)
        self.assertEqual(json.loads(done.stdout), [])
        made = self.headers()
        self.assertEqual(sorted({Path(name).suffix for name in made}), [".cpp", ".gch", ".h", ".lock", ".o"])
        self.assertEqual([sum(name.endswith(end) for name in made) for end in (".gch", ".o")], [2, 1])
        part("torch_private.cpp_headers").header.cache_clear()
        self.addCleanup(part("torch_private.cpp_headers").header.cache_clear)
        with unittest.mock.patch.dict("os.environ", own):
            part("compiler").warm_up({"device": "cpu", "isa": "native"}, self.out / "second", Quiet())
            self.assertEqual(self.headers(), made, "the second worker made nothing anew")
            seconds = self.compile(captured, "shared")["seconds"]
            self.assertEqual(self.headers(), made, "the compile made nothing anew")
        self.assertNotIn("headers", seconds)

    def test_options_that_cannot_be_are_refused(self) -> None:
        captured = self.small()
        for name, (request, said) in enumerate(
            (
                ({"options": {"fx_graph_cache": True}}, "can't be set: it decides what an artifact is"),
                ({"options": {"epilog_fusion": True}}, "did you mean `epilogue_fusion`?"),
                ({"mode": "max-autotuned"}, "did you mean `max-autotune`?"),
                ({"options": {"attentoin": "math"}}, "did you mean `attention`?"),
                ({"options": {"attention": "maths"}}, "unknown attention `maths` did you mean `math`?"),
                ({"options": {"attention": ["flash"]}}, "unknown attention `['flash']` did you mean `flash`?"),
            )
        ):
            failure = self.fails("compile", self.compile, captured, str(name), **request)
            self.assertIn(said, f"{failure.message} {failure.hint}")

    @long
    def test_attention_becomes_the_kernel_that_is_asked_for(self) -> None:
        opened = self.open(SCALED)
        captured = self.capture(opened, inputs=[("x", "float32", [2, 8, 32])])
        self.assertIn("scaled_dot_product_attention", captured["segments"][0]["graph"])
        samples = self.samples(captured)
        flash = {"aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu("}
        # One process, so that no setting may depend on an earlier one; some prepack weights.
        for index, (options, kernels) in enumerate(
            [
                ({}, flash),
                ({"attention": "math"}, {"aoti_torch_cpu_bmm_out("}),
                ({"attention": "flash"}, flash),
                ({"attention": "math", "freezing": True}, {"aoti_torch_cpu_bmm_out("}),
                ({"freezing": True}, flash),
            ]
        ):
            name = f"attention{index}"
            answer = self.compile(captured, name, options=options)
            code = self.wrapper(name)
            self.assertEqual(set(re.findall(r"aoti_torch_cpu_\w*(?:attention|bmm)\w*\(", code)), kernels, options)
            if not answer["prepared"]:
                agrees(self, opened, captured, answer, [samples["in.0"]])

    @unittest.skipUnless(cuda(), "skipped: no CUDA device")
    def test_a_device_has_several_kernels_for_attention(self) -> None:
        opened = self.open(SCALED, entry="half", device="cuda")
        captured = self.capture(opened, inputs=[("x", "bfloat16", [2, 8, 32])])
        samples = self.samples(captured)
        for name in ("efficient", "flash", "cudnn", "math", "efficient"):
            out = f"{name}{len(list(self.out.iterdir()))}"
            answer = self.compile(captured, out, device="cuda", options={"attention": name})
            code = self.wrapper(out)
            kernels = set(re.findall(r"aoti_torch_cuda__scaled_dot_product_(\w+)_attention\(", code))
            self.assertEqual(kernels, {name} - {"math"})
            agrees(self, opened, captured, answer, [samples["in.0"]], (2e-2, 2e-2), "cuda:0")

    def test_attention_that_the_device_cannot_do_is_refused(self) -> None:
        captured = self.capture(self.open(SCALED), inputs=[("x", "float32", [2, 8, 32])])
        for name in ("efficient", "cudnn"):
            options = {"attention": name, "freezing": name == "cudnn"}
            with contextlib.redirect_stderr(io.StringIO()):
                failure = self.fails("compile", self.compile, captured, name, options=options)
            self.assertEqual(failure.message, f"torch has no `{name}` attention for this device and these inputs")
            self.assertRegex(failure.location, r"^project_\d+\.py:9$")
            self.assertEqual(failure.hint, "leave the option `attention` out, or name another kernel")
        # Failures leave no trace.
        self.compile(captured, "after")

    @long
    def test_autotuning_tries_cpp_kernels_and_packs_no_weight(self) -> None:
        opened = self.open(ATTENTION)
        captured = self.capture(opened, inputs=[("x", "float32", [4, 64, 32])])
        with contextlib.redirect_stderr(io.StringIO()) as log:
            # A build has a cache of its own; here an earlier run may have left its choice.
            fresh = {"autotune_local_cache": False}
            answer = self.compile(captured, "tuned", mode="max-autotune", options=fresh)
        # Which kernel is the fastest is up to the machine; that both were timed, the log says.
        self.assertRegex(log.getvalue(), r"AUTOTUNE bmm[^A]*\n  bmm ")
        self.assertRegex(log.getvalue(), r"AUTOTUNE bmm[^A]*cpp_Cpp\w+ ")
        samples = self.samples(captured)
        held = self.weights(opened)
        for factor in (1.0, 2.0):
            with torch.no_grad():
                for name, parameter in opened.model.named_parameters():
                    parameter.copy_(held[name] * factor)
            agrees(self, opened, captured, answer, [samples["in.0"]], (1e-4, 1e-4))

    def test_kernels_use_no_more_threads_than_the_process_may(self) -> None:
        opened = self.open(WIDE)
        captured = self.capture(opened, inputs=[("x", "float32", [64, 4096])])
        answer = self.compile(captured, "wide", options={"cpp.threads": 3})
        # A matrix product's own kernels obey the process; inductor's get the number, and are right with any.
        code = "".join(file.read_text() for file in (self.out / "wide").rglob("*.cpp"))
        clauses = re.findall(r"#pragma omp parallel.*", code)
        self.assertEqual(set(clauses), {"#pragma omp parallel num_threads(std::min(3, omp_get_max_threads()))"})
        # Of numbers above 0 the sum is about the same in any order.
        x, threads = torch.rand(64, 4096), torch.get_num_threads()
        for number in (1, 2, 3, 4):
            torch.set_num_threads(number)
            (result,) = run(answer["library"], "cpu", {}, [x], 1)
            torch.testing.assert_close(result, torch.tanh(x) * x.sum(), rtol=1e-4, atol=1e-4)
        torch.set_num_threads(threads)

    @long
    def test_a_compiler_that_links_its_cpp_library_statically_makes_artifacts_for_python(self) -> None:
        command = [sys.executable, str(ROOT / "tests/gpu/container.py"), "cpu"]
        environment = {**os.environ, **static_compiler(self.root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("artifact.so: C++ library shared, 0 of its symbols exported", done.stdout)

    def test_a_compiler_that_fails_is_quoted(self) -> None:
        captured = self.small()
        options = {"aot_inductor.compile_wrapper_opt_level": "fno-such-flag"}
        failure = self.fails("compile", self.compile, captured, "cpp", options=options)
        self.assertIn("the C++ compiler failed", failure.message)
        self.assertIn("-fno-such-flag", failure.message)

    def test_programs_with_a_batch_norm_in_half_precision_round_where_eager_does(self) -> None:
        compiler = part("compiler")
        norm, layer = torch.nn.BatchNorm2d(4), torch.nn.LayerNorm(4)
        for module, dtype, wanted in ((norm, "bfloat16", True), (norm, "float32", False), (layer, "float16", False)):
            with self.subTest(module=module, dtype=dtype):
                net = torch.nn.Sequential(module).eval().to(getattr(torch, dtype))
                exported = torch.export.export(net, (torch.randn(1, 4, 4, 4).to(getattr(torch, dtype)),))
                graph = torch.fx.GraphModule(torch.nn.Module(), exported.graph)
                for name, value in net.state_dict().items():
                    graph.register_buffer(name.replace(".", "_"), value)  # a segment has its weights as buffers
                self.assertEqual(compiler._normalizes_in_half(graph), wanted)
