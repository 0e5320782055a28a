"""Pictures and tables of results: `python -m benches draw benchmarks/cpu.json` writes SVG beside the file, light and
dark, and the table between `<!-- bench NAME -->` and `<!-- /bench -->` in the README. Nothing is written there by hand.
"""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]

THEMES = {
    "light": {"ground": "#ffffff", "text": "#1f2328", "quiet": "#59636e", "rule": "#d1d9e0"},
    "dark": {"ground": "#0d1117", "text": "#e6edf3", "quiet": "#9198a1", "rule": "#30363d"},
}
# Contender: what it is called, its colour on light and on dark, its mark.
CONTENDERS = {
    "precast": ("Precast", "#0a7d55", "#3fca93", "bar"),
    "precast, no graphs": ("Precast, no graphs", "#0a7d55", "#3fca93", "ring"),
    "eager": ("eager", "#6e7781", "#9aa4ae", "circle"),
    "compile": ("torch.compile", "#1f6feb", "#6cb0ff", "circle"),
    "reduce-overhead": ("reduce-overhead", "#8250df", "#c297ff", "diamond"),
    "max-autotune": ("max-autotune", "#bc4c00", "#f0883e", "square"),
    "aoti": ("AOTInductor, Python", "#137c8b", "#4fd0de", "diamond"),
    "onnxruntime": ("ONNX Runtime", "#bf3989", "#ff8ac4", "square"),
}
PHASES = ("#0a7d55", "#1f6feb", "#bc4c00", "#8250df", "#137c8b", "#bf3989", "#6e7781")
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', sans-serif\""


def draw(file: Path, readme: Path) -> None:
    result = json.loads(file.read_text())
    if "latency" not in result:
        return
    for theme in THEMES:
        file.with_name(f"{file.stem}-latency-{theme}.svg").write_text(latency(result, theme))
        if result.get("start"):
            file.with_name(f"{file.stem}-start-{theme}.svg").write_text(start(result, theme))
    text = readme.read_text()
    begin, end = f"<!-- bench {file.stem} -->", "<!-- /bench -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    made = f"{begin}\n{table(result)}\n{end}"
    readme.write_text(pattern.sub(lambda _: made, text))


def kind(result: Row) -> str:
    return "pipelined" if result["device"] == "cuda" else "synchronous"


class Picture:
    """An SVG under construction; y grows downwards."""

    def __init__(self, width: float, theme: str) -> None:
        self.width, self.height, self.theme = width, 0.0, THEMES[theme]
        self.dark = theme == "dark"
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = 12, colour: str = "text", anchor: str = "start") -> None:
        fill = self.theme.get(colour, colour)
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} font-size="{size}" fill="{fill}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        stroke = self.theme.get(colour, colour)
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def colour(self, contender: str) -> str:
        return CONTENDERS[contender][2 if self.dark else 1]

    def mark(self, x: float, y: float, contender: str) -> None:
        colour, shape, r = self.colour(contender), CONTENDERS[contender][3], 4.5
        around = f'stroke="{self.theme["ground"]}" stroke-width="1"'
        self.parts.append(
            {
                "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}" {around}/>',
                "ring": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{colour}" stroke-width="2"/>',
                "square": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}" {around}/>',
                "diamond": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}" {around} '
                f'transform="rotate(45 {x:.1f} {y:.1f})"/>',
                "bar": f'<rect x="{x - 1.5:.1f}" y="{y - 8:.1f}" width="3" height="16" fill="{colour}"/>',
            }[shape]
        )

    def document(self, title: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" role="img" {FONT}>\n<title>{escape(title)}</title>\n'
            f'<rect width="100%" height="100%" fill="{self.theme["ground"]}"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def latency(result: Row, theme: str) -> str:
    """One row a bucket, one mark a contender: its time over Precast's, on a logarithmic axis."""
    rows, by = result["latency"], kind(result)
    found = [r[by][edge] for row in rows for r in row["times_precast"].values() for edge in ("low", "high")]
    low, high = min(0.8, *found) / 1.05, max(2.0, *found) * 1.05
    picture = Picture(820, theme)
    left, right, step = 210, 800, 26
    names = [name for name in CONTENDERS if name == "precast" or any(name in row["times_precast"] for row in rows)]

    def x(value: float) -> float:
        return left + (right - left) * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))

    title = "Time of a call, as a multiple of Precast's (right of the line: slower than Precast)"
    picture.text(16, 26, title, 14)
    picture.text(16, 45, under(result), 11, "quiet")
    at = 16.0
    for name in names:
        picture.mark(at + 5, 66, name)
        picture.text(at + 15, 70, CONTENDERS[name][0], 11, "quiet")
        at += 32 + 6.1 * len(CONTENDERS[name][0])
    top = 92
    bottom = top + step * len(rows)
    for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50):
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
    return picture.document(title)


def start(result: Row, theme: str) -> str:
    """One bar a contender, split by phase."""
    rows = [row for row in result["start"] if row["page_cache"] == "warm"]
    picture = Picture(820, theme)
    left, right, step = 300, 740, 24
    longest = max(row["seconds"]["median"] for row in rows)
    title = "From the start of the process to its first answer"
    picture.text(16, 26, title, 14)
    picture.text(16, 45, f"{under(result)}; page cache warm", 11, "quiet")
    y, phases = 66.0, list(dict.fromkeys(phase for row in rows for phase in row["phases"]))
    at = 16.0
    for phase in phases:
        picture.box(at, y - 9, 10, 10, PHASES[phases.index(phase) % len(PHASES)])
        picture.text(at + 15, y, phase, 11, "quiet")
        at += 34 + 6.1 * len(phase)
    y += 22
    for row in rows:
        picture.text(16, y + 12, f"{row['case']}: {row['contender']}")
        x, scale = float(left), (right - left) / longest
        for phase, seconds in row["phases"].items():
            width = max(0.0, seconds) * scale
            picture.box(x, y, width, 16, PHASES[phases.index(phase) % len(PHASES)])
            x += width
        picture.text(x + 8, y + 12, duration(row["seconds"]["median"]), 12, "text")
        y += step
    picture.height = y + 12
    return picture.document(title)


def under(result: Row) -> str:
    machine = result["machine"]
    device = machine["gpu"].split(",")[0] if result["device"] == "cuda" and machine["gpu"] else machine["processor"]
    return f"{device}, {result['intra_op_threads']} threads, torch {machine['versions']['torch']}, {result['date']}"


def table(result: Row) -> str:
    """Returns the README's table of a result: how many times as long as Precast each peer takes."""
    by = kind(result)
    columns = [name for name in CONTENDERS if any(name in row["times_precast"] for row in result["latency"])]
    head = ["model", "bucket", "Precast", *(CONTENDERS[name][0] for name in columns), "Precast ÷ floor"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in result["latency"]:
        cells = [row["case"], short(row["bucket"]), duration(row["seconds"]["precast"][by]["median"])]
        for name in columns:
            ratio = row["times_precast"].get(name)
            cells.append(times(ratio[by]["median"]) if ratio else "-")
        floor = row.get("floor")
        least = max(floor["arithmetic_seconds"], floor["bytes_seconds"]) if floor else 0.0
        # Below this a launch or a cache decides, and the machine's rates say nothing.
        cells.append(f"{floor['times_floor']:.1f}" if floor and least > 20e-6 else "-")
        lines.append("| " + " | ".join(cells) + " |")
    calls = "pipelined calls" if by == "pipelined" else "calls"
    facts = [f"{under(result)}. Times of {calls}; others as multiples of Precast's, in **bold** where they are faster."]
    facts += sentences(result)
    return "\n".join([*lines, "", *facts, "", made_by(result)])


def made_by(result: Row) -> str:
    commands = result["command"] if isinstance(result["command"], list) else [result["command"]]
    return "Made by " + ", ".join(f"`{command}`" for command in commands) + "."


def sentences(result: Row) -> list[str]:
    """Returns what the other parts found, a line each."""
    said = []
    for case in dict.fromkeys(row["case"] for row in result.get("start", [])):
        rows = [
            r
            for r in result["start"]
            if r["case"] == case and r["page_cache"] == "warm" and r["contender"] != "precast"
        ]
        ours = next(
            r for r in result["start"] if (r["case"], r["contender"], r["page_cache"]) == (case, "precast", "warm")
        )
        others = ", ".join(
            f"{r['contender']} {times(r['times_precast']['median'])}" for r in rows if "times_precast" in r
        )
        said.append(f"- Process start to first answer, {case}: {duration(ours['seconds']['median'])}; {others}.")
    for row in result.get("memory", []):
        peaks = row["peak_bytes"]
        for kind_ in ("host", "device"):
            cells = [
                f"{CONTENDERS[name][0]} {found['1'][kind_] / 2**20:.0f} and {found['8'][kind_] / 2**20:.0f} MiB"
                for name, found in peaks.items()
                if len(found) == 2 and found["1"].get(kind_)
            ]
            if cells:
                said.append(f"- Peak {kind_} memory of {row['case']} with 1 and 8 buckets: {', '.join(cells)}.")
    for row in result.get("threads", []):
        if row["callers"] in (1, 8):
            most = {name: made["median"] for name, made in row["answers_per_second"].items()}
            others = ", ".join(
                f"{CONTENDERS[name][0]} {times(most['precast'] / rate)}"
                for name, rate in most.items()
                if name != "precast"
            )
            said.append(
                f"- Answers a second, {row['case']} {short(' '.join(f'{k}={v}' for k, v in row['sizes'].items()))}, "
                f"{row['callers']} callers, one thread an operator: {most['precast']:.0f}; over {others}."
            )
    for row in result.get("padding", []):
        choices = row["choices"]
        said.append(
            f"- Padding, {row['requests']}, 8 buckets: {choices['cheapest']['padding']:.0%} of what is computed; "
            f"{choices['one bucket']['padding']:.0%} with one bucket, which takes "
            f"{times(row['times_cheapest']['one bucket'])} the time; choosing by size instead of measured cost "
            f"{times(row['times_cheapest']['smallest'])}."
        )
    for row in result.get("upload", []):
        said.append(f"- Weights to the device: {row['upload_gb_s']:.1f} GB/s, {row['share']:.0%} of one pinned copy.")
    if "overhead" in result:
        added = ", ".join(f"{nanos} ns with {group}" for group, nanos in result["overhead"]["added_ns"].items())
        said.append(f"- `Model::run` over the artifact's own C call: {added}.")
    warm = [row["warm_seconds"]["median"] for row in result.get("build", [])]
    if warm:
        said.append(f"- A build with nothing to do: {duration(min(warm))} to {duration(max(warm))}.")
    return said


def short(bucket: str) -> str:
    return re.sub(r"batch=(\d+)", r"B=\1", re.sub(r"seq=(\d+)", r"T=\1", bucket))


def times(value: float) -> str:
    text = f"{value:.2f} x" if value < 10 else f"{value:.0f} x"
    return f"**{text}**" if value < 0.995 else text


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
