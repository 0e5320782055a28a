"""Pictures of a result, as SVG for a light and for a dark page. Nothing in them is drawn by hand."""

import math
from typing import Any
from xml.sax.saxutils import escape

from .run import main_kind
from .words import CONTENDERS, duration, named, short, under

Row = dict[str, Any]

THEMES = {
    "light": {"ground": "#ffffff", "text": "#1f2328", "quiet": "#59636e", "rule": "#d1d9e0"},
    "dark": {"ground": "#0d1117", "text": "#e6edf3", "quiet": "#9198a1", "rule": "#30363d"},
}
PHASES = ("#0a7d55", "#1f6feb", "#bc4c00", "#8250df", "#137c8b", "#bf3989", "#6e7781")
# A contender's name of a part of a start -> its name in the picture, in the order of the colours.
PARTS = {
    "process": ("process", "python"),
    "libraries": ("import", "libtorch_cuda"),
    "CUDA context": ("context",),
    "weights": ("weights", "upload"),
    "model": ("model", "load", "artifact"),
    "CUDA graph": ("graph", "warm_up"),
    "first call": ("first call", "answer", "run", "rest"),
}
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', sans-serif\""


def pictures(result: Row) -> dict[str, str]:
    """Returns SVG documents by name."""
    kinds = [latency, start] if result.get("start") else [latency]
    return {f"{kind.__name__}-{theme}": kind(result, theme) for theme in THEMES for kind in kinds}


class Picture:
    """An SVG under construction; y grows downwards."""

    def __init__(self, title: str, below: str, theme: str) -> None:
        self.title, self.width, self.height, self.theme = title, 820, 0.0, THEMES[theme]
        self.dark = theme == "dark"
        self.parts: list[str] = []
        self.text(16, 26, title, 14)
        self.text(16, 45, below, 11, "quiet")

    def text(self, x: float, y: float, text: str, size: int = 12, colour: str = "text", anchor: str = "start") -> None:
        fill = self.theme.get(colour, colour)
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} font-size="{size}" fill="{fill}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        stroke = self.theme.get(colour, colour)
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{width}"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        sizes = f'width="{max(0.5, width):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {sizes} fill="{colour}"/>')

    def colour(self, contender: str) -> str:
        return CONTENDERS[contender][2 if self.dark else 1]

    def mark(self, x: float, y: float, contender: str) -> None:
        colour, shape, r = self.colour(contender), CONTENDERS[contender][3], 4.5
        around = f'stroke="{self.theme["ground"]}" stroke-width="1"'
        shapes = {
            "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}" {around}/>',
            "ring": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{colour}" stroke-width="2"/>',
            "square": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}" {around}/>',
            "diamond": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}" {around} '
            f'transform="rotate(45 {x:.1f} {y:.1f})"/>',
            "bar": f'<rect x="{x - 1.5:.1f}" y="{y - 8:.1f}" width="3" height="16" fill="{colour}"/>',
        }
        self.parts.append(shapes[shape])

    def document(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:.0f}" '
            f'width="{self.width}" height="{self.height:.0f}" role="img" {FONT}>\n<title>{escape(self.title)}</title>\n'
            f'<rect width="100%" height="100%" fill="{self.theme["ground"]}"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def latency(result: Row, theme: str) -> str:
    """One row a bucket, one mark a contender: its time over Precast's, on a logarithmic axis."""
    rows, by = result["latency"], main_kind(result["device"])
    found = [r[by][edge] for row in rows for r in row["times_precast"].values() for edge in ("low", "high")]
    low, high = min(0.8, *found) / 1.05, max(2.0, *found) * 1.05
    title = "Time of a call, as a multiple of Precast's (right of the line: slower than Precast)"
    picture = Picture(title, under(result), theme)
    left, right, step = 210, 800, 26
    names = [name for name in CONTENDERS if name == "precast" or any(name in row["times_precast"] for row in rows)]

    def x(value: float) -> float:
        return left + (right - left) * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))

    at = 16.0
    for name in names:
        picture.mark(at + 5, 66, name)
        picture.text(at + 15, 70, CONTENDERS[name][0], 11, "quiet")
        at += 32 + 6.1 * len(CONTENDERS[name][0])
    top = 92
    bottom = top + step * len(rows)
    for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100):
        if low <= tick <= high:
            picture.line(x(tick), top - 6, x(tick), bottom, "rule")
            picture.text(x(tick), bottom + 16, f"{tick:g}x", 11, "quiet", "middle")
    for place, row in enumerate(rows):
        y = top + step * (place + 0.5)
        ours = row["seconds"]["precast"][by]["median"]
        picture.text(16, y + 4, f"{row['case']} {short(row['bucket'])}")
        picture.text(left - 12, y + 4, duration(ours), 11, "quiet", "end")
        picture.mark(x(1), y, "precast")
        for name in names[1:]:
            if name in row["times_precast"]:
                ratio = row["times_precast"][name][by]
                picture.line(x(ratio["low"]), y, x(ratio["high"]), y, picture.colour(name), 1.5)
                picture.mark(x(ratio["median"]), y, name)
    picture.height = bottom + 28
    return picture.document()


def start(result: Row, theme: str) -> str:
    """One bar a contender, split by phase."""
    rows = [row for row in result["start"] if row["page_cache"] == "warm"]
    picture = Picture("From the start of the process to its first answer", f"{under(result)}; page cache warm", theme)
    left, right, step = 300, 740, 24
    longest = max(row["seconds"]["median"] for row in rows)
    y, at = 66.0, 16.0
    for colour, (part, names) in zip(PHASES, PARTS.items(), strict=True):
        if any(name in row["phases"] for row in rows for name in names):
            picture.box(at, y - 9, 10, 10, colour)
            picture.text(at + 15, y, part, 11, "quiet")
            at += 34 + 6.1 * len(part)
    y += 22
    for row in rows:
        picture.text(16, y + 12, f"{row['case']}: {named(row['contender'])}")
        x, scale = float(left), (right - left) / longest
        for colour, names in zip(PHASES, PARTS.values(), strict=True):
            width = max(0.0, sum(row["phases"].get(name, 0.0) for name in names)) * scale
            picture.box(x, y, width, 16, colour)
            x += width
        picture.text(x + 8, y + 12, duration(row["seconds"]["median"]), 12, "text")
        y += step
    picture.height = y + 12
    return picture.document()
