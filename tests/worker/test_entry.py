"""Importing the entry: recorded files, and the message of each mistake."""

from __future__ import annotations

import hashlib
import sys

import torch

from .support import Project, model, part, talk

MODEL = "import torch\n\ndef load():\n    return torch.nn.Linear(2, 3)\n"
CHANGES = """\
    path = __file__.rpartition("/")[0] + "/sizes.txt"
    with open(path) as file:
        width = int(file.read())
    subprocess.run(["sh", "-c", "echo 4 > " + path])
    return torch.nn.Linear(width, 3)
"""
WRITES = """\
    path = __file__.rpartition("/")[0] + "/sizes.txt"
    with open(path) as file:
        width = int(file.read())
    with open(path, "w") as file:
        file.write("5")
    return torch.nn.Linear(width, 3)
"""


class OpenTest(Project):
    def test_sources_are_the_projects_own_files_with_digests(self) -> None:
        (self.root / "data").mkdir()
        (self.root / "data" / "sizes.txt").write_text("2 3")
        (self.root / "README.md").write_text("not read")
        (self.root / "used_by_model.py").write_text("WIDTH = 3\n")
        opened = self.open(
            """
            import os, torch, used_by_model

            def load():
                with open(os.path.join(os.path.dirname(__file__), "data", "sizes.txt")) as file:
                    a, b = map(int, file.read().split())
                return torch.nn.Linear(a, b)
            """
        )
        answer = opened.answer()
        name = f"project_{Project.count}.py"
        self.assertEqual([source["path"] for source in answer["sources"]], ["data/sizes.txt", name, "used_by_model.py"])
        self.assertEqual(answer["sources"][0]["digest"], hashlib.sha256(b"2 3").hexdigest())
        self.assertEqual(answer["modules"], {"": "Linear"})
        self.assertIn("torch", [package["name"] for package in answer["packages"]])

    def test_what_a_function_imports_later_is_a_source_too(self) -> None:
        (self.root / "kit").mkdir()
        (self.root / "kit" / "__init__.py").write_text("")
        (self.root / "kit" / "late.py").write_text(
            "def width():\n    from . import numbers_of\n    return numbers_of.N\n"
        )
        (self.root / "kit" / "numbers_of.py").write_text("N = 3\n")
        (self.root / "kit" / "unused.py").write_text("")
        opened = self.open(model("from kit import late\nreturn x[:, :late.width()]"))
        self.addCleanup(lambda: [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("kit")])
        self.assertEqual(
            [source["path"] for source in opened.sources],
            ["kit/__init__.py", "kit/late.py", "kit/numbers_of.py", f"project_{Project.count}.py"],
        )
        self.capture(opened, inputs=[("x", "float32", [2, 5])])

    def test_a_module_that_no_import_statement_names_is_refused_when_it_comes(self) -> None:
        (self.root / "hidden_part.py").write_text("def twice(x):\n    return x + x\n")
        opened = self.open(
            model('return importlib.import_module("hidden_" + "part").twice(x)', extra="import importlib")
        )
        caught = self.fails("capture", self.capture, opened, inputs=[("x", "float32", [2, 5])])
        self.assertIn("`hidden_part.py` was first imported when the module ran", caught.message)

    def test_a_source_that_somebody_changes_meanwhile_is_refused(self) -> None:
        name = self.write("import subprocess, torch\n\ndef load():\n" + CHANGES)
        (self.root / "sizes.txt").write_text("3")
        caught = self.fails("entry_import", part("model.entry").open_model, self.root, f"{name}:load", "cpu")
        self.assertEqual(caught.message, "`sizes.txt` changed while the model was made from it")
        # Files that the entry writes itself do not count.
        self.open("import os, torch\n\ndef load():\n" + WRITES)

    def test_weights_read_by_the_safetensors_library_are_sources(self) -> None:
        (self.root / "reads.py").write_text(
            "import os, torch\nfrom safetensors.torch import load_file\n\ndef load():\n"
            "    model = torch.nn.Linear(2, 3)\n"
            "    model.load_state_dict(load_file(os.path.join(os.path.dirname(__file__), 'w.safetensors')))\n"
            "    return model\n"
        )
        model = torch.nn.Linear(2, 3)
        part("tensors").write(self.root / "w.safetensors", dict(model.state_dict()))
        # In a process of its own: the library is watched from its first import on.
        answer = talk([{"id": 1, "op": "open", "root": str(self.root), "entry": "reads:load", "device": "cpu"}])[0]
        self.assertEqual([source["path"] for source in answer["value"]["sources"]], ["reads.py", "w.safetensors"])
        self.assertIn("safetensors", [package["name"] for package in answer["value"]["packages"]])

    def test_a_package_imported_by_someone_else_first_counts_too(self) -> None:
        import numpy  # noqa: F401

        opened = self.open("import numpy\n" + MODEL)
        self.assertIn("numpy", [package["name"] for package in opened.packages])

    def test_the_model_is_in_eval_mode_without_grad_and_contiguous(self) -> None:
        turned = "model.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())\n"
        model = self.open(MODEL.replace("return", "model =") + f"    {turned}    return model.train()").model
        self.assertFalse(model.training or model.weight.requires_grad)
        self.assertEqual(model.weight.stride(), (2, 1))
        self.assertEqual(float(model.weight[1, 0]), 1.0)

    def test_random_weights_are_the_same_in_every_worker(self) -> None:
        self.assertTrue(torch.equal(*(self.open(MODEL).model.weight for _ in range(2))))

    def test_a_dict_of_modules_is_one_model(self) -> None:
        opened = self.open(
            "import torch\n\ndef load():\n    return {'a': torch.nn.Linear(1, 2), 'b': torch.nn.ReLU()}\n"
        )
        self.assertEqual(opened.answer()["modules"], {"": "Module", "a": "Linear", "b": "ReLU"})

    def test_a_model_in_training_mode_is_reported_as_switched(self) -> None:
        training = "import torch\n\ndef load():\n    return torch.nn.Dropout(0.5)\n"
        (note,) = self.open(training).answer()["notes"]
        self.assertIn("the model was in training mode and is built in eval mode", note)
        for text in ["torch.nn.Dropout(0.5).eval()", "{'a': torch.nn.Dropout(0.5).eval()}"]:
            self.assertEqual(self.open(training.replace("torch.nn.Dropout(0.5)", text)).answer()["notes"], [])

    def test_bad_entries(self) -> None:
        load = part("model.entry").open_model
        name = self.write(
            "import torch\n\ndef load_model():\n    return 3\n\ndef broken():\n    raise ValueError('no.')\n"
        )
        failure = self.fails("entry_import", load, self.root, f"{name[:-1]}x:load", "cpu")
        self.assertIn(name, failure.hint)
        # It is the spec that is wrong, and no line of importlib's.
        self.assertEqual((failure.location, failure.spec), (None, f"{name[:-1]}x:load"))
        self.assertEqual(part("failures").describe(failure, self.root)["location"], None)
        missing = f"there is no Python module `{name[:-1]}x` beside the spec, and none is installed"
        self.assertEqual(failure.message, missing)
        failure = self.fails("entry_call", load, self.root, f"{name}:load", "cpu")
        self.assertEqual((failure.hint, failure.location), ("did you mean `load_model`?", f"{name}.py:1"))
        self.assertEqual(failure.spec, f"{name}:load")
        for entry, said, line in (
            ("load_model", "returned an int, not a torch.nn.Module or a dict of them", 3),
            ("broken", "raised ValueError: no", 7),
        ):
            failure = self.fails("entry_call", load, self.root, f"{name}:{entry}", "cpu")
            self.assertEqual((failure.message, failure.location), (f"`{name}:{entry}` {said}", f"{name}.py:{line}"))
        self.fails("entry_import", load, self.root, "no_colon", "cpu")
        for text in ("import torch\nx = 1\nimport not_there_at_all\n", "import torch\n\ndef load(:\n"):
            name = self.write(text)
            failure = self.fails("entry_import", load, self.root, f"{name}:load", "cpu")
            self.assertEqual(failure.location, f"{name}.py:3")
        self.assertIn("SyntaxError: invalid syntax", failure.message)

    def test_a_file_gives_the_weights(self) -> None:
        load, write = part("model.entry").open_model, part("tensors").write
        name = self.write(
            model(
                "return x",
                "self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)\nself.b.weight = self.a.weight\n"
                'self.register_buffer("step", torch.ones(1), persistent=False)',
            )
        )
        values = {"b.weight": torch.eye(3), "a.bias": torch.ones(3), "b.bias": torch.zeros(3)}
        path = write(self.root / "w.safetensors", values)
        opened = load(self.root, f"{name}:load", "cpu", (), part("weights").Files([path], path))
        self.assertTrue(torch.equal(opened.model.a.weight, torch.eye(3)))
        self.assertEqual(opened.model.a.weight.data_ptr(), opened.model.b.weight.data_ptr())
        self.assertEqual(float(opened.model.step), 1.0)
        self.assertNotIn("w.safetensors", [source["path"] for source in opened.sources])
        answer = part("weights").write(opened, self.out)
        self.assertEqual(answer, {"file": None, "aliases": {"a.weight": "b.weight"}})
