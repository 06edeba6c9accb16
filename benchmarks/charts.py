"""Charts and sentences of the documentation, from the committed results.

    python -m benchmarks.charts      write docs/drawings/chart-*.svg and the marked parts of the pages

`make bench` does this too. A test compares what is written with the data. Charts are SVG, drawn with
the colours of the page (docs/stylesheets/site.css), so that they are readable in light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Result, digits, short
from benchmarks.run import RESULTS

DOCS = RESULTS.parents[1] / "docs"
DRAWINGS = DOCS / "drawings"
GPU, CPU = "gpu-nvidia-h200.json", "cpu-intel-xeon-processor.json"
HEADS, STUDENTS = "heads-nvidia-h200.json", "students-aarch64.json"
SIZES = "sizes-nvidia-h200.json"
IN_SIZES = {"clip": "CLIP", "info_nce": "InfoNCE", "cross_entropy": "Cross-entropy, 32,768 classes"}
CASES = {"language": ("Language model", "sequences of 64 words"), "clip": ("CLIP", "pairs")}  # of the students
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NAMES = {"dense": "PyTorch, all scores", "compile": "torch.compile", "tilewise-filter": "tilewise, filter 1e-2"}
COLORS = {"tilewise": 1, "tilewise-filter": 3, "compile": 2, "dense": 5}  # of site.css; others take 4
UNITS: dict[str, tuple[float, str]] = {"median_ms": (1.0, "ms"), "peak_bytes": (2.0**20, "MiB")}
# The colours of an image on a code host, which does not know those of the site.
STYLE = """  <style>
    svg { color: #1f2430; --tw-1: #3949ab; --tw-2: #c2410c; --tw-3: #0f766e; --tw-4: #9333ea; --tw-5: #71717a;
          --tw-soft: #e0e4f8; --tw-line: #c4c8d4; }
    @media (prefers-color-scheme: dark) {
      svg { color: #e6e8f0; --tw-1: #93a4ff; --tw-2: #fb923c; --tw-3: #2dd4bf; --tw-4: #d8b4fe; --tw-5: #a1a1aa;
            --tw-soft: #2b3158; --tw-line: #4b5068; }
    }
  </style>"""


def main() -> list[Path]:
    """Write the charts and the marked parts of the pages. Returns their paths."""
    written = []
    for name, text in {**charts(), **pages()}.items():
        path = DOCS / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    report: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return report


def charts() -> dict[str, str]:
    """The SVG files by path below docs/."""
    gpu, cpu = load(GPU), load(CPU)
    card = gpu["device"]
    clip = [r for r in gpu["results"] if r["loss"] == "clip" and r["width"] == 512]
    clip_cpu = [r for r in cpu["results"] if r["loss"] == "clip"]
    head = [r for r in gpu["results"] if r["case"] == "cross_entropy-8192-2304-256000-bf16-peaked"]
    step, large = "CLIP step, d = 512, bf16", "8,192 tokens x 256,000 classes, bf16"
    small = f"CLIP step, d = 256, float32, {cpu['device']}"
    learned = {case: [r for r in load(STUDENTS)["results"] if r["case"] == case] for case in CASES}
    return {
        "drawings/chart-clip-time.svg": lines(clip, "median_ms", f"{step}, {card}: time"),
        "drawings/chart-clip-memory.svg": lines(clip, "peak_bytes", f"{step}, {card}: memory above the inputs"),
        "drawings/chart-clip-cpu.svg": lines(clip_cpu, "median_ms", f"{small}: time"),
        "drawings/chart-head-time.svg": bars(head, "median_ms", f"{large}, {card}: time"),
        "drawings/chart-head-memory.svg": bars(head, "peak_bytes", f"{large}, {card}: memory above the inputs"),
        **{f"drawings/chart-student-{case}.svg": curves(rows, student_title(rows)) for case, rows in learned.items()},
        **size_charts(),
    }


def size_charts(report: dict[str, Any] | None = None) -> dict[str, str]:
    """Time against the batch size from 64 on, by path below docs/; empty where nothing was measured."""
    if report is None:
        report = load(SIZES) if (RESULTS / SIZES).exists() else {"results": []}
    found: dict[str, str] = {}
    for loss, words in IN_SIZES.items():
        rows = [r for r in report["results"] if r["loss"] == loss]
        if not rows:
            continue
        title = f"{words}, d = {report['width']}, bf16, {report['device']}: time of a step"
        found[f"drawings/chart-sizes-{loss}.svg"] = lines(rows, "median_ms", title)
    return found


def pages() -> dict[str, str]:
    """The pages by path below docs/, with the parts between the markers replaced."""
    parts = {"index.md": headlines(), "benchmarks.md": [*headlines(), "", *tables()], "distillation.md": students()}
    return {name: replaced((DOCS / name).read_text(encoding="utf-8"), part) for name, part in parts.items()}


def replaced(page: str, part: Sequence[str]) -> str:
    """The page with other text between the markers."""
    return page[: page.index(BEGIN) + len(BEGIN)] + "\n" + "\n".join(part) + "\n" + page[page.index(END) :]


# Sentences and tables


def headlines() -> list[str]:
    """What the results say, in sentences."""
    gpu = load(GPU)
    rows = {(r["case"], r["method"]): r for r in gpu["results"] if r["status"] == "ok"}
    clip = sorted(r["rows"] for r in rows.values() if (r["loss"], r["width"], r["method"]) == ("clip", 512, "compile"))
    pairs = [(rows[f"clip-{n}-512-bf16", "tilewise"], rows[f"clip-{n}-512-bf16", "compile"]) for n in clip]
    time = [ours["median_ms"] / other["median_ms"] for ours, other in pairs]
    memory = [ours["peak_bytes"] / other["peak_bytes"] for ours, other in pairs]
    largest = max((r for (_, m), r in rows.items() if m == "tilewise" and r["loss"] == "clip"), key=lambda r: r["rows"])
    case = "cross_entropy-8192-2304-256000-bf16-peaked"
    ours, other = rows[case, "tilewise-filter"], rows[case, "compile"]
    return [
        f"- **Faster than torch.compile.** On one {gpu['device']}, a step of `clip_loss` takes {min(time):.2f} to "
        f"{max(time):.2f} times as long, at batches of {clip[0]:,} to {clip[-1]:,}.",
        f"- **Linear memory.** It takes {100 * memory[0]:.0f} % of the memory of torch.compile at {clip[0]:,} and "
        f"{100 * memory[-1]:.0f} % at {clip[-1]:,}. "
        f"{largest['rows']:,} pairs fit in {largest['peak_bytes'] / 2**30:.1f} GiB above the inputs.",
        f"- **A filter with a guarantee.** Cross-entropy over {other['cols']:,} classes takes "
        f"{ours['median_ms'] / other['median_ms']:.2f} times as long as torch.compile, in "
        f"{100 * ours['peak_bytes'] / other['peak_bytes']:.0f} % of its memory, on scores like a trained model's. "
        "No row drops more than 1e-2 of its probability.",
        head_line(),
    ]


def head_line() -> str:
    """What the results of language-model heads say."""
    heads = load(HEADS)
    shape = heads["results"][0]["V"]
    of = {row["method"]: row for row in heads["results"] if row["V"] == shape and row["status"] == "ok"}
    ours, theirs, wide = of["tilewise, 256 MiB"], of["TRL"], of["eager, float32 head"]
    times = theirs["log_prob_error"] / ours["log_prob_error"]
    return (
        f"- **Accurate log-probabilities.** Their error is {times:.0f} times smaller than that of heads that round "
        f"logits to bfloat16, in {ours['ms'] / theirs['ms']:.2f} times the time of TRL's head and "
        f"{100 * ours['bytes'] / theirs['bytes']:.0f} % of its memory, with `workspace_mib=256`. A float32 head takes "
        f"{wide['ms'] / ours['ms']:.0f} times as long ([details](post-training.md))."
    )


def tables() -> list[str]:
    """The charts, with their numbers."""
    out: list[str] = []
    if found := size_charts():
        out += ["## From 64 rows on", ""]
        out += ["Time of forward and backward on one H200, for 64 to 65,536 rows of 512 features in bfloat16"]
        out += ["(`python -m benchmarks.ordinary sizes`).", ""]
        out += [line for path in found for line in (f"![Time of a step]({path})", "")]
    for title, name, cases in (
        ("CLIP on a GPU", GPU, lambda r: r["loss"] == "clip" and r["width"] == 512),
        ("CLIP on a CPU with two cores", CPU, lambda r: r["loss"] == "clip"),
        ("The head of a language model", GPU, lambda r: r["case"].startswith("cross_entropy-8192-2304-256000")),
        ("Other losses", GPU, lambda r: r["loss"] in ("siglip", "nt_xent", "retrieval")),
    ):
        report = load(name)
        out += [f"## {title}", "", *pictures(title), *table(report["results"], cases)]
        page = f"../benchmarks/results/{Path(name).stem}.md"
        out += ["", f"`{report['command'].split(' --peers')[0]}`; [all columns]({page}).", ""]
    return out[:-1]


def pictures(title: str) -> list[str]:
    """The charts of a section."""
    found = {"CLIP on a GPU": ("clip-time", "clip-memory"), "CLIP on a CPU with two cores": ("clip-cpu",)}
    found["The head of a language model"] = ("head-time", "head-memory")
    return [line for name in found.get(title, ()) for line in (f"![{title}](drawings/chart-{name}.svg)", "")]


def table(results: list[Result], wanted: Callable[[Result], bool]) -> list[str]:
    """Milliseconds and MiB of each method of each case."""
    rows = [r for r in results if wanted(r) and r["status"] != "absent"]
    rows.sort(key=lambda r: (r["loss"], r["rows"], r["case"]))
    out = ["| case | method | ms | MiB above the inputs |", "|---|---|---:|---:|"]
    for r in rows:
        ok = r["status"] == "ok"
        time = digits(r["median_ms"]) if ok else "out of memory"
        memory = f"{r['peak_bytes'] / 2**20:,.0f}" if ok else ""
        out.append(f"| {r['case']} | {NAMES.get(r['method'], r['method'])} | {time} | {memory} |")
    return out


def students() -> list[str]:
    """The curves of the students, with time, memory and the distance of the curves."""
    report = load(STUDENTS)
    out = ["| student | loss computed by | training step | memory of a step | last loss |", "|---|---|---:|---:|---:|"]
    for case in CASES:
        rows = [r for r in report["results"] if r["case"] == case]
        for r in rows:
            cells = [student_title(rows), NAMES.get(r["method"], r["method"]), f"{r['median_ms']:,.0f} ms"]
            out.append(f"| {' | '.join(cells)} | {r['peak_bytes'] / 2**20:,.0f} MiB | {r['losses'][-1]:.4f} |")
    both = [[r["losses"] for r in report["results"] if r["case"] == case] for case in CASES]
    apart = max(abs(a / b - 1) for pair in both for a, b in zip(*pair, strict=True))
    out += ["", f"The losses of the two methods differ by at most {apart:.0e} of their size in every step.", ""]
    charts = (f"![{CASES[case][0]}](drawings/chart-student-{case}.svg)" for case in CASES)
    return [*out, *(line for chart in charts for line in (chart, ""))][:-1]


def student_title(rows: list[Result]) -> str:
    """The case in words."""
    name, unit = CASES[rows[0]["case"]]
    return f"{name}, {rows[0]['batch']:,} {unit}"


# Drawing


def lines(results: list[Result], field: str, title: str) -> str:
    """A line for each method against the batch size, both axes logarithmic. A cross: out of memory."""
    unit, word = UNITS[field]
    sizes = sorted({r["rows"] for r in results})
    values = [r[field] / unit for r in results if r["status"] == "ok"]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(size: int) -> float:
        return 90 + 440 * math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])

    def y(value: float) -> float:
        return 320 - 260 * (math.log10(value) - low) / (high - low)

    out = []
    for power in range(low, high + 1):
        out += [f'<path d="M90 {y(10**power):.1f} H530" stroke="var(--tw-line)"/>']
        out += [text(82, y(10**power) + 5, f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:g}", "end")]
    out += [text(x(size), 342, short(size), "middle") for size in sizes]
    out += [text(310, 364, "batch size", "middle"), text(82, 44, word, "end")]
    ends: list[float] = []
    methods = dict.fromkeys(r["method"] for r in results if r["status"] == "ok")
    dashed = next((m for m in reversed(methods) if m not in COLORS), None)  # two libraries have one colour
    for method in sorted(methods, key=lambda m: -_last(results, m, field)):
        mine = sorted((r for r in results if r["method"] == method), key=lambda r: r["rows"])
        points = [(x(r["rows"]), y(r[field] / unit)) for r in mine if r["status"] == "ok"]
        color, width = _color(method), 3 if method == "tilewise" else 1.8
        path = " L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        dashes = ' stroke-dasharray="6 4"' if method == dashed else ""
        out.append(f'<path d="M{path}" stroke="{color}" stroke-width="{width}"{dashes} fill="none"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in points]
        lost = [x(r["rows"]) for r in mine if r["status"] == "oom"]
        out += [f'<path d="M{a - 5:.1f} 55 l10 10 m0 -10 l-10 10" stroke="{color}" stroke-width="2"/>' for a in lost]
        height = max([points[-1][1], *(end + 18 for end in ends)])  # names do not overlap
        ends.append(height)
        a, b = points[-1]
        out.append(f'<path d="M{a + 6:.1f} {b:.1f} L538 {height:.1f}" stroke="{color}" opacity="0.4"/>')
        out.append(text(542, height + 5, NAMES.get(method, method), "start", color, method == "tilewise"))
    if any(r["status"] == "oom" for r in results):
        out.append(text(542, 364, "x: out of memory", "start", "var(--tw-5)"))
    return svg(720, 376, title, out)


def curves(results: list[Result], title: str) -> str:
    """Loss against the step, with time and memory of each method. The first line is wide: the others lie on it."""
    losses = [loss for r in results for loss in r["losses"]]
    low, high, steps = math.floor(min(losses)), math.ceil(max(losses)), len(results[0]["losses"])
    out = []
    for value in range(low, high + 1, max(1, (high - low) // 5)):
        height = 320 - 260 * (value - low) / (high - low)
        out += [f'<path d="M60 {height:.1f} H500" stroke="var(--tw-line)"/>', text(52, height + 5, str(value), "end")]
    out += [text(60 + 440 * k / 4, 342, f"{(steps - 1) * k / 4:.0f}", "middle") for k in range(5)]
    out += [text(280, 364, "step", "middle"), text(52, 44, "loss", "end")]
    for place, r in enumerate(results):
        color, look = _color(r["method"]), 'stroke-width="2" stroke-dasharray="5 5"' if place else 'stroke-width="5"'
        points = [(60 + 440 * k / (steps - 1), 320 - 260 * (v - low) / (high - low)) for k, v in enumerate(r["losses"])]
        path = " L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        out.append(f'<path d="M{path}" stroke="{color}" {look} fill="none"/>')
        out.append(text(520, 120 + 90 * place, NAMES.get(r["method"], r["method"]), "start", color, not place))
        numbers = f"{digits(r['median_ms'])} ms per step", f"{r['peak_bytes'] / 2**20:,.0f} MiB above the inputs"
        out += [text(520, 142 + 90 * place + 22 * k, line, "start") for k, line in enumerate(numbers)]
    return svg(720, 376, title, out)


def bars(results: list[Result], field: str, title: str) -> str:
    """A bar for each method."""
    unit, word = UNITS[field]
    rows = sorted((r for r in results if r["status"] == "ok"), key=lambda r: float(r[field]))
    most = max(r[field] for r in rows)
    out = []
    for place, r in enumerate(rows):
        top, width, color = 46 + 34 * place, 400 * r[field] / most, _color(r["method"])
        out.append(f'<rect x="190" y="{top}" width="{width:.1f}" height="24" rx="3" fill="{color}"/>')
        out.append(text(180, top + 17, NAMES.get(r["method"], r["method"]), "end", bold="tilewise" in r["method"]))
        out.append(text(198 + width, top + 17, f"{digits(r[field] / unit)} {word}", "start"))
    return svg(720, 56 + 34 * len(rows), title, out)


def text(x: float, y: float, words: str, anchor: str, color: str = "currentColor", bold: bool = False) -> str:
    """A line of text."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{weight}>{words}</text>'


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """The whole file."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="14">'
    caption = text(width / 2, 22, title, "middle", bold=True)
    return "\n".join([head, STYLE, *(f"  {part}" for part in [caption, *parts]), "</svg>", ""])


def _color(method: str) -> str:
    return f"var(--tw-{COLORS.get(method, 4)})"


def _last(results: list[Result], method: str, field: str) -> float:
    mine = [r for r in results if r["method"] == method and r["status"] == "ok"]
    return float(max(mine, key=lambda r: r["rows"])[field])


if __name__ == "__main__":
    for file in main():
        print(f"wrote {file}")
