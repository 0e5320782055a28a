"""A preprocessor of mdbook: `{{#essay PATH}}` in a page becomes the essay (`//!`) at the top of that Rust file.

The essays are written for `cargo doc`, so a link to a Rust item becomes the item's name here.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def essay(path: str) -> str:
    """Returns the text of a file's `//!` lines, one heading level lower."""
    lines = []
    for line in (ROOT / path).read_text().splitlines():
        if not line.startswith("//!"):
            if lines and not line.startswith("#!["):
                break
            continue
        lines.append(line.removeprefix("//!").removeprefix(" "))
    if not lines:
        raise SystemExit(f"error: `{path}` has no essay")
    text = re.sub(r"^(#+ )", r"#\1", "\n".join(lines), flags=re.M)
    # [`Item`], [`Item`](super::Item) and [text](crate::item) lead to Rust items.
    text = re.sub(r"\[(`[^`\]]+`)\](?!\()(?!:)", r"\1", text)
    return re.sub(r"\[([^\]]+)\]\((?:crate|super|self|Self|[A-Za-z_]+)::[^)]*\)", r"\1", text)


def expand(section: Any) -> None:
    """Expands the essays of a chapter and of those below it."""
    chapter = section.get("Chapter") if isinstance(section, dict) else None
    if chapter:
        found = r"\{\{#essay ([^}]+)\}\}"
        chapter["content"] = re.sub(found, lambda match: essay(match.group(1).strip()), chapter["content"])
        for inner in chapter["sub_items"]:
            expand(inner)


if __name__ == "__main__":
    if sys.argv[1:2] == ["supports"]:
        sys.exit(0)
    _context, book = json.load(sys.stdin)
    for item in book.get("items", book.get("sections", [])):
        expand(item)
    json.dump(book, sys.stdout)
