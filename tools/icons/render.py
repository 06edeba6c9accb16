"""SVG to grey levels. Needs the packages ``resvg_py`` and ``Pillow``; used by this tool only."""

from __future__ import annotations

import io
import re

import numpy as np

SIDE = 32
INKLESS = 2  # of 15: a picture whose darkest pixel is lighter than this much ink shows nothing
_NUMBER = r"-?[0-9.]+(?:e-?[0-9]+)?"


def square_svg(svg: str) -> str:
    """The same drawing in the middle of a square ``viewBox``, without a size of its own.

    >>> square_svg('<svg width="4" height="2" viewBox="0 0 4 2"><path/></svg>')
    '<svg viewBox="0 -1 4 4"><path/></svg>'
    """
    svg = svg[svg.index("<svg") :]
    end = svg.index(">")
    root, rest = svg[:end], svg[end:]
    size = {
        key: float(match[1])
        for key in ("width", "height")
        if (match := re.search(rf'\s{key}="({_NUMBER})(?:px)?"', root))
    }
    box = re.search(rf'\sviewBox="\s*({_NUMBER})[\s,]+({_NUMBER})[\s,]+({_NUMBER})[\s,]+({_NUMBER})\s*"', root)
    left, top, width, height = (float(v) for v in box.groups()) if box else (0.0, 0.0, size["width"], size["height"])
    root = re.sub(r'\s(width|height|viewBox)="[^"]*"', "", root)
    side = max(width, height)
    view = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
    return f'<svg viewBox="{view}"{root[4:]}{rest}'


def render(svg: str, side: int = SIDE) -> np.ndarray | None:
    """Grey levels (side, side), 0 (ink) to 15 (paper); None if the drawing is blank or cannot be read."""
    import resvg_py
    from PIL import Image

    try:
        png = resvg_py.svg_to_bytes(
            svg_string=square_svg(svg), width=side, height=side, background="#ffffff", skip_system_fonts=True
        )
    except (ValueError, KeyError):
        return None
    grey = np.asarray(Image.open(io.BytesIO(bytes(png))).convert("L"))
    if grey.shape != (side, side):
        return None
    levels = ((grey.astype(np.uint16) + 8) // 17).astype(np.uint8)
    return levels if levels.min() <= 15 - INKLESS else None
