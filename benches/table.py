"""The table of a result in a page of the book, between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`: what each peer
takes, what else was measured, and where Precast is not ahead. Nothing is written there by hand but the causes, below.
"""

import json
import re
from pathlib import Path
from typing import Any

from .draw import pictures
from .run import main_kind
from .words import AHEAD, CONTENDERS, duration, named, rival, short, times, under

Row = dict[str, Any]

PACKED = (
    "both have their weights packed for the matrix product, each in kernels of its own. An artifact's are oneDNN's, "
    "and MKL's for small products: calls that cost about 10 and 3 microseconds before they compute anything. Kernels "
    "that inductor makes of a product and what surrounds it would change it."
)
EAGER = (
    "eager answered, since the gate of the build found it faster than the artifact, as it may on a busy machine. "
    "Building again on a quiet one would change it."
)
# Device -> (case or kind of row, peer) -> why a peer is ahead and what would change it; "" stands for any. What no
# profile has shown yet says so, or is left out.
CAUSES: dict[str, dict[tuple[str, str], str]] = {
    "cpu": {
        ("resnet", ""): (
            "all of them have batch norms folded and filters packed, and nearly all of a call is convolutions. With "
            "one thread an artifact's, which are oneDNN's, took no longer than ONNX Runtime's in a profile; what is "
            "left is probably how several threads share each, after which all wait for the last."
        ),
        ("eager", ""): EAGER,
        ("start", ""): (
            "it does not load libtorch, which registers all its operators when it is loaded: most of a start of "
            "Precast, before anything of its own runs; and Precast packs weights at every start. A libtorch without "
            "what no artifact calls, and packed weights that are kept, would change it."
        ),
        ("", "onnxruntime"): PACKED,
        ("", "max-autotune"): PACKED,
    },
    "cuda": {
        ("eager", ""): EAGER,
    },
}


def draw(file: Path, page: Path) -> None:
    """Writes a result's table into a page, between the marks of the page's name, and its pictures beside the page."""
    result = json.loads(file.read_text())
    if "latency" not in result or "intra_op_threads" not in result:
        raise SystemExit(f"error: `{file}` is no result of `python -m benches run`")
    name = page.stem
    for kind, document in pictures(result).items():
        page.with_name(f"{name}-{kind}.svg").write_text(document)
    text = page.read_text()
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"error: `{page}` has no `{begin}` with a `{end}` after it")
    made = f"{begin}\n{section(result, name, f'benches/results/{file.name}')}\n{end}"
    page.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: made, text, flags=re.S))


def section(result: Row, stem: str, figures: str) -> str:
    """Returns the table with its pictures, which are named after `stem`; `figures` is where all figures are."""
    by = main_kind(result["device"])
    calls = "pipelined calls" if by == "pipelined" else "single calls"
    command = "make bench" if result["device"] == "cpu" else "benches/gpu.sh OUT"
    about = (
        f"Medians of {calls}: Precast's time, and what the others take as multiples of it, in **bold** where they are "
        f"ahead by more than {1 - AHEAD:.0%}; the floor is what the machine's measured rates of multiplying and "
        f"copying allow. `{command}` measures them; all figures, with their spread and the command of each run: "
        f"`{figures}`."
    )
    pieces = [
        f"{under(result)}.",
        picture(stem, "latency", "Time of a call, as a multiple of Precast's"),
        about,
        table(result),
        picture(stem, "start", "From the start of a process to its first answer") if result.get("start") else "",
        "\n".join(sentences(result)),
        "\n".join(losses(result)),
    ]
    return "\n\n".join(piece for piece in pieces if piece)


def picture(stem: str, name: str, title: str) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{stem}-{name}-dark.svg">'
        f'<img src="{stem}-{name}-light.svg" alt="{title}"></picture>'
    )


def table(result: Row) -> str:
    """Returns how many times as long as Precast each peer takes."""
    by = main_kind(result["device"])
    columns = [name for name in CONTENDERS if any(name in row["times_precast"] for row in result["latency"])]
    head = ["model", "bucket", "Precast", *(named(name) for name in columns), "Precast ÷ floor"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in result["latency"]:
        rung = "" if row.get("rung") in ("exact", None) else f" ({row['rung']})"
        cells = [row["case"], short(row["bucket"]), duration(row["seconds"]["precast"][by]["median"]) + rung]
        for name in columns:
            ratio = row["times_precast"].get(name)
            cells.append(times(ratio[by]["median"], name) if ratio else "-")
        floor = row.get("floor")
        # Below this a launch or a call decides, and the machine's rates say nothing.
        cells.append(f"{floor['times_floor']:.1f}" if floor and max(floor["seconds"].values()) > 20e-6 else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def callers(count: int) -> str:
    return "1 caller" if count == 1 else f"{count} callers"


def losses(result: Row) -> list[str]:
    """Returns the rows where a peer is ahead, with the cause."""
    by, found = main_kind(result["device"]), []
    for row in result["latency"]:
        case = row["case"] if row.get("rung") in ("exact", None) else "eager"
        peers = {peer: ratio[by] for peer, ratio in row["times_precast"].items() if peer in CONTENDERS}
        found += [(case, f"{row['case']} {short(row['bucket'])}", *each) for each in peers.items()]
    for row in result.get("threads", []):
        where = f"{row['case']}, {callers(row['callers'])}"
        found += [(row["case"], where, *each) for each in row["precast_times"].items()]
    for row in result.get("start", []):
        where = f"start of {row['case']}, {row['page_cache']} page cache"
        found += [("start", where, row["contender"], row["times_precast"])] if "times_precast" in row else []
    causes: dict[str, dict[str, list[str]]] = {}
    for case, where, peer, ratio in found:
        if rival(peer) and ratio["median"] < AHEAD:
            why = cause(result["device"], case, peer)
            causes.setdefault(why, {}).setdefault(where, []).append(f"{named(peer)} {ratio['median']:.2f} x")
    if not causes:
        return [f"No peer is ahead by more than {1 - AHEAD:.0%} in any row."]
    lines = ["Where a peer is ahead (its time in Precast's):", ""]
    for why, rows in causes.items():
        where = "; ".join(f"{row}: {', '.join(peers)}" for row, peers in rows.items())
        lines.append(f"- {where}. {why[0].upper()}{why[1:]}")
    return lines


def cause(device: str, case: str, peer: str) -> str:
    keys = ((case, peer), (case, ""), ("", peer))
    return next((CAUSES[device][key] for key in keys if key in CAUSES[device]), "the cause is not known yet.")


def sentences(result: Row) -> list[str]:
    """Returns the results of the other parts, a line each."""
    lines = []
    starts = [row for row in result.get("start", []) if row["page_cache"] == "warm"]
    for case in dict.fromkeys(row["case"] for row in starts):
        rows = {row["contender"]: row for row in starts if row["case"] == case}
        ours = duration(rows.pop("precast")["seconds"]["median"])
        ratios = {name: row["times_precast"]["median"] for name, row in rows.items() if "times_precast" in row}
        others = ", ".join(f"{named(name)} {times(ratio, name)}" for name, ratio in ratios.items())
        lines.append(f"- Process start to first answer, {case}: {ours}; {others}.")
    threads = result.get("threads", [])
    for row in threads:
        if row["callers"] in (1, max(other["callers"] for other in threads)):
            rates = {name: made["median"] for name, made in row["answers_per_second"].items()}
            ours, where = rates.pop("precast"), short(" ".join(f"{dim}={size}" for dim, size in row["sizes"].items()))
            others = ", ".join(f"{named(name)} {times(ours / rate)}" for name, rate in rates.items())
            lines.append(
                f"- Answers a second, {row['case']} {where}, {callers(row['callers'])}, one thread an operator: "
                f"{ours:.0f}; over {others}."
            )
    warm = [row["warm_seconds"]["median"] for row in result.get("build", [])]
    if warm:
        lines.append(f"- A build with nothing to do: {duration(min(warm))} to {duration(max(warm))}.")
    return lines
