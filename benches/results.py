"""Puts one benchmark's result, from stdin, under its name into a file of `benches/results` that holds several.

python -m benches.results build-cpu.json warm < RESULT
"""

import json
import sys
from pathlib import Path


def put(path: Path, name: str, result: object) -> None:
    """Replaces the result of this name; the others stay."""
    document = json.loads(path.read_text()) if path.exists() else {"schema": 1}
    path.write_text(json.dumps(document | {name: result}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    put(Path(__file__).parent / "results" / sys.argv[1], sys.argv[2], json.load(sys.stdin))
