#!/usr/bin/env python3
"""A worker that speaks the protocol of crates/precast-builder/src/protocol.rs without torch, for tests.

Every module of a fake model computes `scale * (input 0 + input 1 + …) + OFFSET`, elementwise, in float32 (artifact.c):
`scale` is the model's only weight. The model's file is imported like a real one. Its entry returns a dict of
submodules, FQN -> class name, and its globals `SCALE` and `OFFSET` are the weight and the number that is folded into
the graph.

Faults are steered by comments in the model's file, or in a file `steer` beside it, which is no source,
each for one request or, with a bucket, for that bucket:

    # fake: capture fails              # fake: capture fails batch=8
    # fake: capture is slow            takes a second
    # fake: capture waits              until there is a file `go` beside the model
    # fake: trains                     the model was in training mode
    # fake: returns text               beside its tensor
    # fake: padding is refused         by the module itself
    # fake: has eager                  for every size: with FAKE_EAGER
    # fake: takes 2 to 40              rows, in eager
    # fake: seq is exact               any dimension: no smaller request is padded in it
    # fake: eager fails                after the capture listed its segments
    # fake: eager is slow              takes a second
    # fake: open fails again           no worker but the first can make the model
    # fake: open hangs again           others make it for ever
    # fake: open eats again            others take memory, and more of it
    # fake: open finds another source  others import another OFFSET, from a file that is then as it was
    # fake: compile fails              the compiler's message goes to the log
    # fake: compile dies               the worker is killed in mid-compile
    # fake: compile hangs              no answer, ever
    # fake: compile eats               memory, and more of it
    # fake: compile spawns             a process in a session of its own (its number goes to `spawned`); then it hangs
    # fake: link -Wl,-z,execstack      the library is linked with this flag too
    # fake: compile skips              the library is a line of text: for builds that run nothing
    # fake: compile is slow            takes a second
    # fake: compile waits              no answer until there is a file `go` beside the model; makes a file `waiting`
    # fake: compile is short           of memory, once: makes a file `short` beside the model
    # fake: answers wrong              the artifact computes something else than eager
    # fake: answers nan
    # fake: answers vary                   a little, every other time
    # fake: padding leaks                  into the answer of the artifact, not of eager
    # fake: run fails
    # fake: run warns                  through libtorch
    # fake: device is small            memory for one capture or compile at a time: the first has it until another is
                                       refused, which makes a file `refused` beside the model
    # fake: device is full             memory for none

A comment that begins with a mode or an option is for artifacts compiled with it; the last line counts:

    # fake: mode=default takes 900               microseconds a run
    # fake: epilogue_fusion=false takes 300
    # fake: max_autotune=true fails              its compile; or it `dies`, or `hangs`
    # fake: max_autotune=true answers wrong      or `crashes` when it is run
    # fake: pass=kernels:fast takes 100          for artifacts that this pass runs on

    # fake: offers kernels:fast epilogue_fusion=false    an installed package does so, to --tune: a pass and options
    # fake: segments of kernels:fast                     this pass is for segments, not for whole graphs

The findings of `check` come from comments too, each at its own line:

    # fake: finds print medium

    # fake: inputs are nested          so that `init` can't write them
    # fake: generates                  so that `init` writes prefill and decode

A global `DECLARED` of the model's file has the submodules' own settings: FQN -> method -> keys of [compile]. A
graph pass is a function that changes the segment (a dict with `offset`) in place. The log of a compile has the mode and
the options it was asked for.

The environment variable FAKE_TORCH changes the torch version that the worker claims; FAKE_TORCH=none claims to lack it.
FAKE_SITE is the folder of the packages that it claims to have, with a torch. FAKE_OFF is a feature that is off there.
FAKE_SHIM is a file with its answer about the shim; without it the shim is a line of text.
FAKE_EAGER is the text of the graph that eager runs; without it there is none.
"""

import array
import contextlib
import difflib
import fnmatch
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAKES = HERE.parents[1] / "target" / "tmp" / "fakes"
CHECKOUT = HERE.parent.parent
# dtype -> (safetensors name, struct format, torch's scalar type)
DTYPES = {
    "uint8": ("U8", "B", 0),
    "int8": ("I8", "b", 1),
    "int16": ("I16", "h", 2),
    "int32": ("I32", "i", 3),
    "int64": ("I64", "q", 4),
    "float32": ("F32", "f", 6),
    "float64": ("F64", "d", 7),
    "bool": ("BOOL", "?", 11),
}
Json = dict[str, Any]


class Failure(Exception):
    def __init__(
        self, code: str, message: str, hint: str | None = None, location: str | None = None, spec: str | None = None
    ) -> None:
        super().__init__(message)
        self.answer = {"code": code, "message": message, "hint": hint, "location": location, "spec": spec}


def until(done: Callable[[], bool]) -> None:
    """Waits until something is so; no longer than minutes, so that a test which waits for this one ends too."""
    end = time.monotonic() + 300
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


class Worker:
    def __init__(self, say: Callable[[Json], None]) -> None:
        self.say = say
        self.root = Path()
        self.model: Any = None
        self.modules: dict[str, str] = {}

    def hello(self, request: Json) -> Json:
        claimed = os.environ.get("FAKE_TORCH")
        if claimed == "none":
            raise Failure("torch_missing", "this Python has no torch", "install torch there")
        # The real version, without importing it: stores made by this worker run on the same host.
        version: Json = {}
        site = Path(os.environ.get("FAKE_SITE") or (CHECKOUT / ".venv/libtorch").resolve().parent)
        exec((site / "torch/version.py").read_text(), version)
        off = os.environ.get("FAKE_OFF")
        return {
            "protocol": 2,
            "python": ".".join(map(str, sys.version_info[:3])),
            "site_packages": [str(site)],
            "torch": claimed or version["__version__"],
            "torch_git": version["git_version"],
            "cuda": version["cuda"],
            "cxx11_abi": True,
            "off": [{"what": off, "why": "a name moved: builds take longer"}] if off else [],
        }

    def warm_up(self, request: Json) -> Json:
        return {"seconds": {}}

    def shim(self, request: Json) -> Json:
        if answer := os.environ.get("FAKE_SHIM"):
            return json.loads(Path(answer).read_text())
        # For builds that run nothing.
        out = Path(request["out"])
        out.mkdir(parents=True, exist_ok=True)
        (out / "shim").write_text(f"a shim of {len(request['sources'])} files")
        return {"file": str(out / "shim"), "cuda": None, "why": None}

    def open(self, request: Json) -> Json:
        self.root = Path(request["root"]).resolve()
        sys.path.insert(0, str(self.root))
        name, function = request["entry"].split(":")
        try:
            self.model = importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                raise Failure("entry_import", f"there is no module `{name}`", spec=request["entry"]) from error
            raise Failure("entry_import", f"can't import `{name}`: {error}", location=self.frame()) from error
        if not hasattr(self.model, function):
            near = difflib.get_close_matches(function, vars(self.model), n=1)
            hint = f"did you mean `{near[0]}`?" if near else None
            raise Failure("entry_call", f"`{name}` has no `{function}`", hint, f"{name}.py:1", request["entry"])
        try:
            self.modules = getattr(self.model, function)()
        except Exception as error:
            raise Failure("entry_call", f"`{request['entry']}` failed: {error}", location=self.frame()) from error
        if request.get("weights"):
            paths, name = map(Path, request["weights"]), Path(request["weights_name"])
            self.model.SCALE = read_scale(paths, name, request["unused_weights"])
        behaviours = ("open fails again", "open hangs again", "open eats again", "open finds another source")
        first = "worker-0" in Path(os.environ["TMPDIR"]).parts
        again = [what for what in behaviours if not first and self.has(what, {})]
        hoard = []
        while "open eats again" in again:
            hoard.append(bytearray(os.urandom(1 << 20)) * 32)
            time.sleep(0.05)
        if "open hangs again" in again:
            time.sleep(3600)
        if "open fails again" in again:
            raise Failure("entry_call", "the fake model is made once")
        found = b""
        if "open finds another source" in again:
            self.model.OFFSET, found = 77.0, b"OFFSET = 77.0"
        for other in request.get("also") or []:
            importlib.import_module(other.split(":")[0])
        files = [Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
        own = sorted(f for f in files if self.root in f.parents)

        def digest(file: Path) -> str:
            return hashlib.sha256(file.read_bytes() + found).hexdigest()

        return {
            "sources": [{"path": f.relative_to(self.root).as_posix(), "digest": digest(f)} for f in own],
            "packages": [],
            "modules": self.modules,
            "declared": getattr(self.model, "DECLARED", {}),
            "fingerprint": str(self.model.SCALE),
            "notes": ["the model was in training mode"] if self.has("trains", {}) else [],
        }

    def frame(self) -> str | None:
        """Returns the innermost line of the user's own code in the exception that is being handled."""
        own = [f for f in traceback.extract_tb(sys.exc_info()[2]) if self.root in Path(f.filename).parents]
        return f"{Path(own[-1].filename).relative_to(self.root)}:{own[-1].lineno}" if own else None

    def has(self, what: str, sizes: dict[str, int]) -> bool:
        """Returns whether the model's file asks for this behaviour at this bucket."""
        bucket = " ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        steer = self.root / "steer"
        text = Path(self.model.__file__).read_text() + (steer.read_text() if steer.exists() else "")
        asked = re.findall(r"^# fake: (.*?)\s*$", text, re.MULTILINE)
        return any(line == what or (line.startswith(what + " ") and line[len(what) + 1 :] in bucket) for line in asked)

    @contextlib.contextmanager
    def memory(self, root: Path, small: bool, full: bool) -> Iterator[None]:
        """The memory of a device, for one job."""
        taken = root / "device"
        try:
            file = taken.open("x") if small and not full else None
        except FileExistsError:
            full = True
        if full:
            (root / "refused").touch()
            raise Failure("out_of_memory", "CUDA out of memory")
        try:
            if small:
                until((root / "refused").exists)
            yield
        finally:
            if small:
                file.close()
                taken.unlink()

    def weights(self, request: Json) -> Json:
        file = Path(request["out"]) / "weights.safetensors"
        save(file, {"scale": ("float32", [1], [self.model.SCALE])})
        return {"file": str(file), "aliases": {}}

    def describe(self, request: Json) -> Json:
        """A fake model has the inputs that it is asked for, or one of its own."""
        asked = request["inputs"] or [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
        inputs = [{**one, "pad": 0, "range": [0, 9] if one["dtype"].startswith("int") else None} for one in asked]
        dims = {dim for one in asked for dim in one["shape"] if isinstance(dim, str)}
        layers = [name for name in self.modules if name.startswith("encoder.layer.")]
        regions = [{"glob": "encoder.layer.*", "count": len(layers), "artifacts": 1}]
        common = {"method": "forward", "state": {}, "regions": regions}
        modules = [{"name": "forward", "inputs": None if self.has("inputs are nested", {}) else inputs, **common}]
        generates = self.has("generates", {})
        if generates:
            common |= {"method": "step", "state": {"cache.*.*": [1, 2, "context", 8]}}
            ids = {"name": "ids", "dtype": "int64", "shape": [1, "seq"], "pad": None, "range": [0, 97]}
            at = {"name": "at", "dtype": "int64", "shape": ["seq"], "pad": None, "range": [0, "context"]}
            heat = {"name": "heat", "dtype": "float32", "shape": [1], "pad": None, "range": None, "default": 0.0}
            one = [{**ids, "shape": [1, 1]}, {**at, "shape": [1]}, heat]
            many = [ids, at, heat]
            modules = [{"name": "prefill", "inputs": many, **common}, {"name": "decode", "inputs": one, **common}]
        return {
            "class": "Fake",
            "modules": modules,
            "generative": generates,
            "sizes": {"seq": [4], "context": [16, 64]} if generates else {dim: [2, 4] for dim in sorted(dims)},
            "dtype": "float32",
            "notes": ["it can't be captured"] if self.has("capture fails", {}) else [],
        }

    def inputs(self, request: Json) -> Json:
        """Every submodule is called with the inputs of the model."""
        if not request["inputs"]:
            raise Failure("bad_input", f"nothing says what `{request['path']}` is called with")
        args = [{"tensor": number} for number in range(len(request["inputs"]))]
        return {"inputs": request["inputs"], "structure": {"args": args, "kwargs": {}}}

    def check(self, request: Json) -> Json:
        """Returns the findings of the comments in the model's file."""
        self.regions(request["module"])
        text = Path(self.model.__file__).read_text()
        findings = [
            {
                "category": category,
                "severity": severity,
                "why": f"the fake model has a `{category}`",
                "fix": {"text": "leave it out", "lines": ["pass"]},
                "location": f"model.py:{line}",
                "function": "Model.forward",
                "source": source,
            }
            for line, source in enumerate(text.splitlines(), 1)
            for category, severity in re.findall(r"^# fake: finds (\S+) (\S+)$", source)
        ]
        order = ["high", "medium", "low"]
        findings.sort(key=lambda one: order.index(one["severity"]))
        return {
            "findings": findings,
            "unknown": ["how it answers at `batch` = 1"],
            "captured": not any(one["severity"] == "high" for one in findings),
            "steps": 2,
            "artifacts": 1,
            "dynamic": {"batch": {"min": 1, "max": None}},
            "lists": [{"glob": "encoder.layer.*", "class": "Layer", "count": 2, "artifacts": 1, "region": False}],
            "graph": [],
            "recompiles": self.recompiles(request) if request["recompiles"] else None,
            "cost": self.cost(request) if request["cost"] else None,
            "seconds": 0.5,
        }

    def recompiles(self, request: Json) -> Json:
        told = [
            {"sizes": {"batch": size}, "graphs": graphs, "breaks": 0, "guards": ["batch == 2"] if size == 4 else []}
            for size, graphs in ((2, 1), (2, 0), (4, 1))
        ]
        return {"calls": told, "limit": 8}

    def cost(self, request: Json) -> Json:
        one = {"flops": 2_000_000, "bytes": 4096, "seconds": 0.001}
        buckets = [{"sizes": sizes, **one} for sizes in request["buckets"]]
        rates = {"flops_per_second": 2e9, "bytes_per_second": 4e9, "measured": "nobody"}
        return {"buckets": buckets, "weights": 2048, **rates}

    def regions(self, module: Json) -> None:
        for pattern in module["regions"]:
            if not fnmatch.filter(self.modules, pattern):
                raise Failure("no_module", f"region `{pattern}` matches no submodule that is called", spec=pattern)

    def capture(self, request: Json) -> Json:
        module, sizes, out = request["module"], request["sizes"], Path(request["out"])
        path, inputs = module["path"], module["inputs"]
        if path not in self.modules:
            near = difflib.get_close_matches(path, self.modules, n=1)
            hint = f"did you mean `{near[0]}`?" if near else None
            raise Failure("no_module", f"the model has no submodule `{path}`", hint, spec=path)
        self.regions(module)
        if module["method"] != "forward":
            raise Failure("no_method", f"`{self.modules[path]}` has no method `{module['method']}`")
        limited = self.has("takes 2 to 40", {})
        if module.get("dynamic") and not (limited or self.has("has eager", {})):
            raise Failure("capture", "the fake model has no dynamic dimensions")
        if self.has("capture is slow", sizes):
            time.sleep(1)
        if self.has("capture waits", sizes):
            until((self.root / "go").exists)
        if self.has("capture fails", sizes):
            raise Failure("capture", "the fake model can't be captured", "make it simpler", "model.py:1")
        with self.memory(self.root, *(self.has(f"device is {what}", sizes) for what in ("small", "full"))):
            pass
        shape = inputs[0]["shape"]
        if any(i["shape"] != shape or i["dtype"] not in DTYPES for i in inputs):
            raise Failure("bad_input", "a fake module takes inputs of one shape and of a simple dtype")

        out.mkdir(parents=True, exist_ok=True)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        layout = {"dtype": "float32", "shape": shape, "stride": strides}
        given = [{"dtype": i["dtype"], "shape": i["shape"], "stride": i["stride"]} for i in inputs]
        offset = self.model.OFFSET + (1.0 if self.has("answers wrong", sizes) else 0.0)
        segment = {
            "inputs": given,
            "offset": offset,
            "run_fails": self.has("run fails", sizes),
            "run_warns": self.has("run warns", sizes),
            "answers_nan": self.has("answers nan", sizes),
            "answers_vary": self.has("answers vary", sizes),
            "leaks": self.has("padding leaks", sizes),
        }
        text = Path(self.model.__file__).read_text()

        def described(name: str) -> Json:
            return {"callable": name, "source": hashlib.sha256(name.encode()).hexdigest()}

        later = re.findall(r"^# fake: segments of (\S+)$", text, re.MULTILINE)
        offers = [line.split() for line in re.findall(r"^# fake: offers (.*)$", text, re.MULTILINE)]
        passes = {
            "own": [described(name) for name in module.get("passes") or [] if name in later],
            "offered": [
                {
                    "passes": [described(name)],
                    "options": {key: json.loads(value) for key, value in (one.split("=") for one in options)},
                }
                for name, *options in offers
            ],
        }
        for name in module.get("passes") or []:
            if name in later:
                continue
            file, function = name.split(":")
            getattr(importlib.import_module(file), function)(segment)
        behaviours = ("fails", "dies", "hangs", "eats", "spawns", "skips", "waits", "is slow", "is short")
        behaviour = {what: self.has(f"compile {what}", sizes) for what in behaviours}
        behaviour |= {what: self.has(f"device is {what}", sizes) for what in ("small", "full")}
        behaviour["root"] = str(self.root)
        behaviour["by_option"] = re.findall(r"^# fake: (\S+=\S+) (.*?)\s*$", text, re.MULTILINE)
        behaviour["link"] = re.findall(r"^# fake: link (\S+)$", text, re.MULTILINE)
        (out / "segment.json").write_text(json.dumps({**segment, **behaviour}))
        segments = [
            {
                "graph": json.dumps(segment, sort_keys=True),
                "file": str(out / "segment.json"),
                "inputs": given,
                "outputs": [layout],
                "constants": [{"name": "c0", "dtype": "float32", "shape": [1], "stride": [1]}],
            }
        ]
        numbers = list(range(len(inputs)))
        step = {"name": path, "segment": 0, "inputs": numbers, "outputs": [len(inputs)], "binding": {"c0": "scale"}}
        if self.has("eager is slow", sizes):
            time.sleep(1)
        if self.has("eager fails", sizes):
            raise Failure("bad_input", "the fake model fails on sample inputs", None, "model.py:1")

        count = math.prod(shape)
        rng = random.Random(0)
        values = [[draw(rng, i) for _ in range(count)] for i in inputs]
        answer = [self.model.SCALE * sum(column) + self.model.OFFSET for column in zip(*values, strict=True)]
        samples = {f"in.{k}": (i["dtype"], shape, values[k]) for k, i in enumerate(inputs)}
        samples["out.0"] = ("float32", shape, answer)
        # Each bucketed dimension one smaller.
        small = [n - 1 if dim and n > 1 else n for n, dim in zip(shape, inputs[0]["dims"], strict=True)]
        if small != shape:
            values = [[draw(rng, i) for _ in range(math.prod(small))] for i in inputs]
            samples |= {f"smaller.0.in.{k}": (i["dtype"], small, values[k]) for k, i in enumerate(inputs)}
            sums = [self.model.SCALE * sum(column) + self.model.OFFSET for column in zip(*values, strict=True)]
            samples["smaller.0.out.0"] = ("float32", small, sums)
        save(out / "samples.safetensors", samples)

        exact = [dim for dim in sizes if self.has("padding is refused", sizes) or self.has(f"{dim} is exact", sizes)]
        follow = [None if dim is None else {"dim": dim, "scale": 1, "offset": 0} for dim in inputs[0]["dims"]]
        answer: Json = {
            "segments": segments,
            "steps": [step],
            "passes": passes,
            "inputs": inputs,
            "outputs": [{"name": "out", **layout, "dims": follow}],
            "results": [len(inputs)],
            "values": len(inputs) + 1,
            "call_spec": {"fake": True},
            "notes": ["output `note` is a str"] if self.has("returns text", sizes) else [],
            "exact": dict.fromkeys(exact, "it refuses"),
            "samples": str(out / "samples.safetensors"),
            "seconds": 0.01,
        }
        if limited and module.get("dynamic"):
            answer["dynamic"] = {dim: {"min": 2, "max": 40} for dim in module["dynamic"]}
        if says := os.environ.get("FAKE_EAGER"):
            (out / "eager.json").write_text(says)
            answer["exported"] = str(out / "eager.json")
        return answer

    def truth(self, request: Json) -> Json:
        """Gives eager's own answers as those with more digits."""
        text = Path(request["samples"]).read_bytes()
        start = 8 + struct.unpack("<Q", text[:8])[0]
        found = {}
        for name, one in json.loads(text[8:start]).items():
            if one["dtype"] == "F32" and "out." in name:
                first, last = one["data_offsets"]
                values = array.array("f", text[start + first : start + last])
                found[name] = ("float64", one["shape"], list(values))
        save(Path(request["out"]) / "truth.safetensors", found)
        return {"file": str(Path(request["out"]) / "truth.safetensors")}

    def compile(self, request: Json) -> Json:
        segment, out = json.loads(Path(request["file"]).read_text()), Path(request["out"])
        print(f"fake: mode {request['mode']}, options {json.dumps(request['options'])}", file=sys.stderr, flush=True)
        names = {f"mode={request['mode']}", *(f"{key}={json.dumps(v)}" for key, v in request["options"].items())}
        names |= {f"pass={one['callable']}" for one in request["passes"]}
        says = [what for name, what in segment["by_option"] if name in names]
        sleep = [int(what.removeprefix("takes ")) for what in says if what.startswith("takes ")]
        with self.memory(Path(segment["root"]), segment["small"], segment["full"]):
            pass
        if segment["is short"] and not (short := Path(segment["root"]) / "short").exists():
            short.touch()
            raise Failure("out_of_memory", "CUDA out of memory")
        if "fails" in says:
            raise Failure("compile", "the C++ compiler does not like this option")
        if segment["dies"] or "dies" in says:
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if segment["spawns"]:
            child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            self.root.joinpath("spawned.new").write_text(str(child.pid))
            self.root.joinpath("spawned.new").rename(self.root / "spawned")
        if segment["hangs"] or "hangs" in says or segment["spawns"]:
            time.sleep(3600)
        hoard = []
        while segment["eats"]:
            hoard.append(bytearray(os.urandom(1 << 20)) * 32)
            time.sleep(0.05)
        if segment["is slow"]:
            time.sleep(1)
        if segment["waits"]:
            root = Path(segment["root"])
            (root / "waiting").touch()
            # Without the folder the test is over.
            until(lambda: not root.exists() or (root / "go").exists())
        if segment["fails"]:
            print("kernel.cpp:12: error: this line is in the log", file=sys.stderr, flush=True)
            raise Failure("compile", "the C++ compiler failed with exit code 1")
        out.mkdir(parents=True, exist_ok=True)
        defines = {
            "NUM_INPUTS": len(segment["inputs"]),
            "INPUT_DTYPES": braces(DTYPES[i["dtype"]][2] for i in segment["inputs"]),
            "DIMS": len(segment["inputs"][0]["shape"]),
            "SIZES": braces([*segment["inputs"][0]["shape"], 0]),
            "OFFSET": repr(float(segment["offset"]) + ("answers wrong" in says)),
            "RUN_FAILS": int(segment["run_fails"]),
            "ANSWERS_NAN": int(segment["answers_nan"]),
            "LEAKS": int(segment["leaks"]),
            "VARIES": int(segment["answers_vary"]),
            "SLEEP_US": sleep[-1] if sleep else 0,
            "WARNS": int(segment["run_warns"]),
            "CRASHES": int("crashes" in says),
        }
        source, library = out / "model.c", out / "model.so"
        if segment["skips"]:
            library.write_text(f"{defines}\n")
            return {"library": str(library), "metadata": {"AOTI_DEVICE_KEY": "cpu"}, "seconds": {}}
        lines = [f"#define {name} {value}" for name, value in defines.items()]
        source.write_text("\n".join([*lines, f'#include "{HERE / "artifact.c"}"', ""]))
        link(source, library, segment["link"])
        return {
            "library": str(library),
            "metadata": {"AOTI_DEVICE_KEY": "cpu"},
            "seconds": {"lower": 0.01, "cpp": 0.02, "link": 0.01},
        }


def link(source: Path, library: Path, flags: list[str]) -> None:
    """Compiles an artifact; equal ones once for all tests, in the folder that `compiled` of records.rs has too."""
    content = source.read_bytes() + (HERE / "artifact.c").read_bytes()
    kept = FAKES / f"{hashlib.sha256(content).hexdigest()}.so"
    if not flags and kept.exists():
        shutil.copy(kept, library)
        return
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *flags, "-o", library, source, "-lm"], check=True)
    if not flags:
        with contextlib.suppress(OSError):  # a checkout that can't be written
            FAKES.mkdir(parents=True, exist_ok=True)
            unfinished = kept.with_suffix(f".{os.getpid()}")
            shutil.copy(library, unfinished)
            unfinished.rename(kept)


def braces(items: Any) -> str:
    return "{" + ", ".join(map(str, items)) + "}"


def draw(rng: random.Random, declared: Json) -> Any:
    if declared["dtype"].startswith("float"):
        return struct.unpack("f", struct.pack("f", rng.uniform(-1, 1)))[0]
    low, high = declared.get("range") or [0, 2]
    return rng.randrange(low, high)


def read_scale(paths: Iterable[Path], name: Path, unused: list[str]) -> float:
    """Returns the model's only weight; the files have no other tensor, except those in `unused`."""
    held: dict[str, Json] = {}
    scale = 0.0
    for path in paths:
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        held |= header
        if "scale" in header:
            start, stop = header["scale"]["data_offsets"]
            scale = struct.unpack_from("<f", data[end + start : end + stop])[0]
    if "scale" not in held:
        raise Failure("weights", f"`{name}` has no tensor `scale`", "add it")
    if (shape := held["scale"]["shape"]) != [1]:
        raise Failure("weights", f"tensor `scale` of `{name}` is {shape}, not [1]", "export it again")
    if others := sorted(held.keys() - {"scale", "__metadata__", *unused}):
        raise Failure("weights", f"`{name}` has tensor `{others[0]}`: the model has none of that name", "leave it out")
    return scale


def save(path: Path, tensors: dict[str, tuple[str, list[int], list[Any]]]) -> None:
    """Writes a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: Json = {}
    data = b""
    # Larger elements first, so that each tensor is aligned.
    order = sorted(tensors.items(), key=lambda item: (-struct.calcsize(DTYPES[item[1][0]][1]), item[0]))
    for name, (dtype, shape, values) in order:
        code, form, _ = DTYPES[dtype]
        block = bytes(values) if form == "?" else array.array(form, values).tobytes()
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main() -> None:
    # Only the protocol goes to the real stdout; whatever else is printed goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(lambda line: print(json.dumps(line), file=answers))
    for line in sys.stdin:
        request = json.loads(line)
        answer: Json
        try:
            print(f"fake: {request['op']}", file=sys.stderr, flush=True)
            value = getattr(worker, request["op"])(request)
            answer = {"kind": "result", "id": request["id"], "value": value}
        except Failure as failure:
            error = {**failure.answer, "trace": traceback.format_exc()}
            answer = {"kind": "error", "id": request["id"], "error": error}
        except Exception as failure:
            error = {"code": "internal", "message": str(failure), "trace": traceback.format_exc()}
            answer = {"kind": "error", "id": request["id"], "error": error}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
