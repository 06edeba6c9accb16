"""The report of a run in one self-contained HTML file: recalls, searches, curves and memory."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import CheckpointError, ConfigError, DataError
from tilewise.train.charts import Line, bar_chart, line_chart
from tilewise.train.checkpoint import latest_checkpoint
from tilewise.train.config import RunConfig
from tilewise.train.data import EvalPairs, SkipLog
from tilewise.train.evaluate import KS, Encoders, telling_k
from tilewise.train.evaluate_run import open_pairs
from tilewise.train.load_run import load_run
from tilewise.train.memory import MIB
from tilewise.train.pictures import png_data_uri, to_pil
from tilewise.train.progress import counted
from tilewise.train.run_folder import RunFolder
from tilewise.train.search import Gallery, Hit
from tilewise.train.settings import to_toml
from tilewise.train.status import read_status
from tilewise.train.terminal import say
from tilewise.train.untrusted import visible
from tilewise.train.writing import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

ICON_QUERIES = (
    "shopping cart", "arrow left", "rain cloud", "bell", "lock", "music", "calendar", "battery",
    "user", "trash", "heart", "camera",
)  # fmt: skip

TRAIN_NUMBERS = ("loss", "scale", "grad_norm", "seconds", "rows")
EVAL_NUMBERS = tuple(f"{side}_{what}{k}" for side in ("t2i", "i2t") for what in ("r", "chance") for k in KS)

STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--soft:#6b7280;--paper:#fff;--card:#f8fafc;--line:#e5e7eb}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--paper:#111827;--card:#1f2937;--line:#374151}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1040px;padding:32px 20px;background:var(--paper);color:var(--ink);
  font:16px/1.5 system-ui,sans-serif}
h1{margin:0 0 4px;font-size:28px}h2{margin:36px 0 12px;font-size:20px}
.soft{color:var(--soft)}.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:16px}
.wide{grid-template-columns:repeat(auto-fit,minmax(400px,1fr))}.big{font-size:30px;font-weight:650}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
  min-width:0}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--line)}
svg .title{font-size:13px;font-weight:600;fill:var(--ink)}
table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
.query{margin:0 0 14px}.hits{display:flex;flex-wrap:wrap;gap:8px;margin-top:4px}
figure{margin:0;width:76px;text-align:center}
figure img{width:64px;height:64px;border-radius:8px;background:#fff;border:1px solid var(--line)}
figure.right img{outline:3px solid #16a34a}
figcaption{font-size:11px;line-height:1.25;color:var(--soft);overflow-wrap:anywhere}
pre{overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px;font-size:12px}
"""


def write_report(
    folder: str | Path, encoders: Encoders | None, pairs: EvalPairs | None, weights: str = "", note: str = ""
) -> Path:
    """Write report.html for a run in any state.

    Args:
        folder: folder of the run.
        encoders: its model, for the searches; None if there is no checkpoint.
        pairs: its held-out pairs, if there are any.
        weights: the step of the model, and why it was chosen.
        note: the reason if there are no searches although there could be.
    """
    run = RunFolder(folder)
    results: list[tuple[str, list[Hit]]] = []
    if pairs is not None and encoders is not None:
        queries = report_queries(pairs)
        results = list(zip(queries, Gallery(encoders, pairs).search(queries, top=10), strict=True))
    try:
        checkpoint, _ = latest_checkpoint(run.checkpoints)
    except CheckpointError:  # all of them are damaged
        checkpoint = None
    memory = checkpoint.state["memory"] if checkpoint is not None else {}
    skipped = checkpoint.state["skips"]["counts"] if checkpoint is not None else {}
    status = _status(run.path)
    page = render(run.read_config(), run.read_metrics(), results, memory, skipped, status, weights, note)
    write_atomically(run.report, page, "The run is not affected")
    return run.report


def report_run(console: Console, folder: Path, device: str = "auto", which: str = "auto") -> Path:
    """Write the report of any run: finished, running, stopped, killed or failed, with or without a checkpoint."""
    run = RunFolder(folder)
    config = run.read_config()
    encoders, pairs, weights, note = None, None, "", ""
    try:
        _, encoders, choice = load_run(folder, device, which, console)
        weights = f"step {choice.step}: {choice.why}"
        with counted(console, "reading held-out images") as watch:
            pairs = open_pairs(config.data, encoders.model.pixels, choice.checkpoint, "", "", SkipLog(), watch)
    except (CheckpointError, DataError) as error:  # no checkpoint yet, or data that has moved
        if isinstance(error, CheckpointError) and which != "auto":
            raise
        note = f"No searches: {error}"
        say(console, note)
    return write_report(folder, encoders, pairs, weights, note)


def _status(folder: Path) -> str:
    """Return how far the run is, or an empty string for a finished run."""
    try:
        status = read_status(folder)
    except ConfigError:  # an earlier version wrote no status
        return ""
    return "" if status.status == "finished" else status.sentence()


def report_queries(pairs: EvalPairs) -> list[str]:
    """Return the queries of the report: fixed words for icons, otherwise captions of the set."""
    if pairs.icons is not None:
        return list(ICON_QUERIES)
    step = max(1, len(pairs.texts) // 8)
    return pairs.texts[::step][:8]


def render(
    config: RunConfig,
    metrics: Sequence[dict[str, Any]],
    results: Sequence[tuple[str, Sequence[Hit]]],
    memory: dict[str, Any],
    skipped: dict[str, int],
    status: str = "",
    weights: str = "",
    note: str = "",
) -> str:
    """Return the page as text."""
    train = [line for line in metrics if line["kind"] == "train" and _has_numbers(line, TRAIN_NUMBERS)]
    evals = [line for line in metrics if line["kind"] == "eval" and _has_numbers(line, EVAL_NUMBERS)]
    sections = [
        _headline(config, train, evals), _paragraph(status), _recalls(evals), _gallery(results, weights),
        _paragraph(note), _curves(train, evals), _memory(config, memory, train), _skipped(skipped), _settings(config),
    ]  # fmt: skip
    name = escaped(Path(config.output.folder).name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>tilewise: {name}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def escaped(text: str) -> str:
    """Return text of a user's data for the page, in which it is neither a tag nor changes the direction of text."""
    return html.escape(visible(text), quote=True)


def _has_numbers(line: dict[str, Any], names: Sequence[str]) -> bool:
    return all(isinstance(line.get(name), int | float) for name in names)


def _headline(config: RunConfig, train: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> str:
    name = escaped(Path(config.output.folder).name)
    cards = []
    if evals and evals[-1].get("t2i_chance10"):
        k = telling_k(evals[-1])
        recall, chance = evals[-1][f"t2i_r{k}"], evals[-1][f"t2i_chance{k}"]
        cards.append((f"{100 * recall:.1f} %", f"text-to-image recall at {k}, {recall / chance:.0f} times chance"))
    if train:
        seconds = sum(line["seconds"] for line in train)
        pairs = sum(line["rows"] for line in train)
        cards.append((f"{config.loop.batch_size:,}", f"pairs per batch, {config.loop.chunk_size:,} per chunk"))
        speed = pairs / max(seconds, 1e-9)
        cards.append((f"{len(train):,}", f"logged steps, {seconds / 60:.1f} minutes, {speed:,.0f} pairs/s"))
    boxes = "".join(
        f'<div class="card"><div class="big">{big}</div><div class="soft">{small}</div></div>' for big, small in cards
    )
    about = f"{config.model.name} on {config.data.source}, loss {config.loss.name} ({config.loss.kind})"
    return f'<h1>{name}</h1><p class="soft">{escaped(about)}</p><div class="row">{boxes}</div>'


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text[0].upper() + text[1:].rstrip('.'))}.</p>" if text else ""


def _recalls(evals: Sequence[dict[str, Any]]) -> str:
    if not evals:
        return ""
    last, rows = evals[-1], []
    for key, title in (("t2i", "text to image"), ("i2t", "image to text")):
        values = [(last[f"{key}_r{k}"], last[f"{key}_r{k}"] / last[f"{key}_chance{k}"]) for k in KS]
        cells = "".join(f'<td>{100 * r:.1f} % <span class="soft">({times:.0f} x)</span></td>' for r, times in values)
        rows.append(f"<tr><td>{title}</td>{cells}</tr>")
    head = "".join(f"<th>recall at {k} (times chance)</th>" for k in KS)
    return f"<h2>Held-out recall</h2><table><tr><th>direction</th>{head}</tr>{''.join(rows)}</table>"


def _gallery(results: Sequence[tuple[str, Sequence[Hit]]], weights: str) -> str:
    if not results:
        return ""
    blocks = []
    for query, hits in results:
        figures = "".join(_figure(hit) for hit in hits)
        blocks.append(f'<div class="query"><b>{escaped(query)}</b><div class="hits">{figures}</div></div>')
    about = (
        "The best images for some queries, among held-out images that the model was not trained on. "
        f"Images whose caption is the query have a green frame. The weights are those of {escaped(weights)}."
    )
    return f'<h2>Searches</h2><p class="soft">{about}</p>{"".join(blocks)}'


def _figure(hit: Hit) -> str:
    assert hit.image is not None
    label, mark = escaped(hit.label), ' class="right"' if hit.right else ""
    picture = png_data_uri(to_pil(hit.image, 64))
    return f'<figure{mark}><img alt="{label}" src="{picture}"><figcaption>{label}</figcaption></figure>'


def _curves(train: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> str:
    if not train:
        return ""
    steps, k = [line["step"] for line in train], telling_k(evals[-1]) if evals else KS[-1]
    charts = [
        line_chart("Loss", [Line("loss", steps, [line["loss"] for line in train])]),
        line_chart(
            f"Held-out recall at {k}",
            [
                Line(name, [line["step"] for line in evals], [line[f"{key}_r{k}"] for line in evals])
                for key, name in (("t2i", "text to image"), ("i2t", "image to text"))
            ],
            percent=True,
        ),
        line_chart("Logit scale", [Line("scale", steps, [line["scale"] for line in train])]),
        line_chart("Gradient norm", [Line("norm", steps, [line["grad_norm"] for line in train])]),
    ]
    cards = "".join(f'<div class="card">{chart}</div>' for chart in charts if chart)
    return f'<h2>Curves</h2><div class="row wide">{cards}</div>'


def _memory(config: RunConfig, memory: dict[str, Any], train: Sequence[dict[str, Any]]) -> str:
    if not memory:
        return ""
    peak = max((line.get("memory_bytes") or 0 for line in train), default=0)
    own, dense = f"loss, {config.loss.name}", "loss, dense"
    rows = [
        ("data", memory["data"], memory["data"]), ("loss", memory["loss"], memory["dense_loss"]),
        ("backbone", memory["backbone"], memory["backbone"]), ("peak", memory["peak"], memory["dense_peak"]),
    ]  # fmt: skip
    table = "".join(f"<tr><td>{name}</td><td>{_mib(a)}</td><td>{_mib(b)}</td></tr>" for name, a, b in rows)
    if peak:
        whole = "of the device" if memory["measured"] else "of the whole process"
        table += f"<tr><td>measured peak {whole}</td><td>{_mib(peak)}</td><td></td></tr>"
    chart = bar_chart(
        "Memory of the loss",
        [(own, memory["loss"], _mib(memory["loss"])), (dense, memory["dense_loss"], _mib(memory["dense_loss"]))],
    )
    how = (
        "measured on the device"
        if memory["measured"]
        else "sums of tensor sizes, with the workspace of the loss at its limit"
    )
    return (
        '<h2>Memory</h2><p class="soft">peak = data + max(loss, backbone). This run\'s figures are '
        f"{how}; those of the dense loss include the four score matrices that it stores in backward. "
        "The measured peak also has what belongs to no part: libraries, the reading of images and evaluations.</p>"
        '<div class="row wide"><div class="card"><table><tr><th>part</th><th>this run</th><th>dense loss</th></tr>'
        f'{table}</table></div><div class="card">{chart}</div></div>'
    )


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:,.2f} GiB"


def _skipped(skipped: dict[str, int]) -> str:
    if not skipped:
        return ""
    items = "".join(f"<li>{count:,} x {escaped(reason)}</li>" for reason, count in skipped.items())
    return f"<h2>Skipped records</h2><ul>{items}</ul><p>Of several ranks: the records of rank 0.</p>"


def _settings(config: RunConfig) -> str:
    return f"<h2>Settings</h2><details><summary>config.toml</summary><pre>{escaped(to_toml(config))}</pre></details>"
