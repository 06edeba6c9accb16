"""Line and bar charts as small inline SVG. The page's style sheet colours text and grid lines."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777")


@dataclass(frozen=True)
class Line:
    """A named curve."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most about `most` round numbers from `low` to `high`.

    >>> ticks(0.0, 9.0)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if high <= low:
        return [low]
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number in few characters.

    >>> short(0.25), short(1200.0), short(3.0)
    ('0.25', '1,200', '3')
    """
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def line_chart(title: str, lines: Sequence[Line], *, width: int = 460, height: int = 240, percent: bool = False) -> str:
    """Return curves over steps as SVG, or an empty string if no value is finite."""
    left, right, top, bottom = 54, 12, 30, 28
    lines = [
        Line(line.name, *zip(*points, strict=True))
        for line in lines
        if (points := [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)])
    ]
    if not lines:
        return ""
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    y0 = 0.0 if 0 <= y0 < 0.5 * y1 or (percent and y0 == y1) else y0
    x_ticks = ticks(x0, x1)
    y1, x1 = (y1 if y1 > y0 else y0 + 1), (x1 if x1 > x0 else x0 + 1)

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)

    parts = [_open(title, width, height)]
    for tick in ticks(y0, y1):
        label = f"{100 * tick:.3g}%" if percent else short(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{px(tick):.1f}" y="{height - 8}" text-anchor="middle">{short(tick)}</text>')
    offset = left
    for line, colour in zip(lines, COLOURS, strict=False):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        if len(line.xs) == 1:
            parts.append(f'<circle cx="{px(line.xs[0]):.1f}" cy="{py(line.ys[0]):.1f}" r="3" fill="{colour}"/>')
        if len(lines) > 1:
            parts.append(f'<text x="{offset}" y="30" style="fill:{colour}">{html.escape(line.name)}</text>')
            offset += 8 * len(line.name) + 16
    return "".join(parts) + "</svg>"


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]], *, width: int = 460, log: bool = False) -> str:
    """Return horizontal bars as SVG. Each bar is (name, value, label)."""
    row, left, right, top = 26, 150, 90, 34
    height = top + row * len(bars) + 6
    values = [math.log10(max(value, 1.0)) if log else value for _, value, _ in bars]
    low = 0.9 * min(values) if log else 0.0
    most = max([*values, low + 1e-9])
    parts = [_open(title, width, height)]
    for number, ((name, _, label), value) in enumerate(zip(bars, values, strict=True)):
        y = top + row * number
        length = max(2.0, (value - low) / (most - low) * (width - left - right))
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        colour = COLOURS[number % 2]
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{row - 8}" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 15}">{html.escape(label)}</text>')
    return "".join(parts) + "</svg>"


def _open(title: str, width: int, height: int) -> str:
    name = html.escape(title)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'
        f'<text class="title" x="4" y="15">{name}</text>'
    )
