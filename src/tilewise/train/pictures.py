"""A sheet of search results as PNG, and small pictures in the terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

if TYPE_CHECKING:
    from rich.text import Text


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


def contact_sheet(titles: Sequence[str], rows: Sequence[Sequence[tuple[Tensor, str]]], side: int = 64) -> Image.Image:
    """Return a sheet with one row of captioned pictures per title."""
    gap, line = 12, 16
    columns = max((len(row) for row in rows), default=1)
    width = gap + columns * (side + gap)
    height = gap + len(rows) * (side + 2 * line + 2 * gap)
    sheet = Image.new("RGB", (max(width, 240), height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    top = gap
    for title, row in zip(titles, rows, strict=True):
        draw.text((gap, top), title, fill="black", font=font)
        for column, (image, label) in enumerate(row):
            left = gap + column * (side + gap)
            sheet.paste(to_pil(image, side).convert("RGB"), (left, top + line))
            draw.text((left, top + line + side + 2), _fit(label, side), fill=(90, 90, 90), font=font)
        top += side + 2 * line + 2 * gap
    return sheet


def _fit(label: str, side: int) -> str:
    most = max(3, side // 6)
    return label if len(label) <= most else label[: most - 1] + "…"


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
