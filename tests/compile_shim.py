"""Compiles the shim for tests with the worker's own code: `compile_shim.py FOLDER ANSWER`.

FOLDER has the C++ in `sources`. ANSWER is written last, and names the shared objects.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "crates/precast-builder"))


def main(folder: Path, answer: Path) -> None:
    """Writes the answer."""
    os.environ["PRECAST_HEADER_DIR"] = str(folder)
    folder.chmod(0o755)
    from worker.torch_private.cpp_shim import compile_shim

    sources = {path.name: path.read_text() for path in (folder / "sources").iterdir()}
    with tempfile.TemporaryDirectory() as out:
        found = compile_shim(sources, "cuda", Path(out), lambda _: None)
    partial = answer.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found))
    os.replace(partial, answer)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
