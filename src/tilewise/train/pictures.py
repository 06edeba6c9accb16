"""A sheet of search results as PNG, and small pictures in the terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

if TYPE_CHECKING:
    from rich.text import Text


LINES = 24  # of a title or a caption on a sheet


def to_pil(image: Tensor, side: int) -> Image.Image:
    """Convert uint8 (channels, s, s) to a square picture of `side` pixels."""
    channels, height, width = image.shape
    grey = channels == 1
    rows = image[0] if grey else image.permute(1, 2, 0)
    made = Image.frombytes("L" if grey else "RGB", (width, height), bytes(rows.contiguous().flatten().tolist()))
    return made.resize((side, side), Image.Resampling.LANCZOS)


def png_data_uri(image: Image.Image) -> str:
    """Return a picture as a data URI for HTML pages."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def contact_sheet(
    titles: Sequence[str], rows: Sequence[Sequence[tuple[Tensor, str, bool]]], side: int = 96
) -> Image.Image:
    """Return a sheet with one row of pictures per title, each with its caption below it, in at most `LINES` lines.

    Args:
        titles: one for each row.
        rows: (picture, caption, whether to put a green frame around it).
        side: pixels of a picture.
    """
    gap, line = 12, 14
    font = ImageFont.load_default()
    columns = max((len(row) for row in rows), default=1)
    width = max(gap + columns * (side + gap), 240)
    heads = [_wrapped(title, width - 2 * gap, font) for title in titles]
    labels = [[_wrapped(label, side, font) for _, label, _ in row] for row in rows]
    heights = [
        line * (len(head) + max((len(lines) for lines in below), default=0)) + side + 2 * gap
        for head, below in zip(heads, labels, strict=True)
    ]
    sheet = Image.new("RGB", (width, gap + sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), gap
    for head, row, below, height in zip(heads, rows, labels, heights, strict=True):
        draw.text((gap, top), "\n".join(head), fill="black", font=font, spacing=2)
        y = top + line * len(head) + 4
        for column, ((image, _, framed), lines) in enumerate(zip(row, below, strict=True)):
            x = gap + column * (side + gap)
            if framed:
                draw.rectangle([x - 3, y - 3, x + side + 2, y + side + 2], fill=(22, 163, 74))
            sheet.paste(to_pil(image, side).convert("RGB"), (x, y))
            draw.text((x, y + side + 4), "\n".join(lines), fill=(90, 90, 90), font=font, spacing=2)
        top += height
    return sheet


def _wrapped(text: str, width: int, font: Any) -> list[str]:
    """Break a text into lines of at most `width` pixels. Words that are too long are broken as well.

    After `LINES` lines, the text ends with three dots.
    """
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < LINES:
        end = _line_end(rest, width, font)
        if end < len(rest) and len(lines) == LINES - 1:
            end = _line_end(rest, width - font.getlength("..."), font)
            lines.append(f"{rest[:end]}...")
        else:
            lines.append(rest[:end])
        rest = rest[end:].lstrip()
    return lines


def _line_end(text: str, width: float, font: Any) -> int:
    """Return the number of characters of the first line, by bisection over at most `width` characters."""
    fits, too_long = 1, min(len(text), max(1, int(width))) + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if font.getlength(text[:middle]) <= width:
            fits = middle
        else:
            too_long = middle
    space = text.rfind(" ", 1, fits + 1) if fits < len(text) else -1
    return space if space > 0 else fits


def terminal_picture(image: Tensor, columns: int = 16) -> list[Text]:
    """Return a picture in half blocks. Each character is two pixels, one above the other."""
    from rich.style import Style
    from rich.text import Text

    small = F.interpolate(image.float().mean(0)[None, None], (columns, columns), mode="area")[0, 0]
    levels = small.round().int().tolist()
    lines = []
    for upper, lower in zip(levels[0::2], levels[1::2], strict=True):
        text = Text()
        for a, b in zip(upper, lower, strict=True):
            text.append("▀", Style(color=f"rgb({a},{a},{a})", bgcolor=f"rgb({b},{b},{b})"))
        lines.append(text)
    return lines
