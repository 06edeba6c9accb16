"""Image files to square uint8 tensors with Pillow: RandomResizedCrop for training, a centre crop otherwise."""

from __future__ import annotations

import functools
import io
import math
import random
import struct
from typing import cast

import torch
from PIL import ExifTags, Image
from torch import Tensor

from tilewise.train.data.records import RecordError

Box = tuple[int, int, int, int]
PIXEL_LIMIT = 89_478_485  # width times height; the limit from which Pillow warns of a decompression bomb
# Pillow reads more formats. For some of them (EPS) it starts another program on an untrusted file.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")
TURNS = {  # keys are values of the EXIF orientation tag
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes) -> Image.Image:
    """Decode an image file to RGB with `on_white`.

    Raises `RecordError` for a damaged file, a format that is not in `FORMATS`, or more than `PIXEL_LIMIT` pixels.
    """
    try:
        image = open_image(data)
        image.load()
        _check_pixels(image)  # decoding can change the size, for example of an icon file
        return on_white(image)
    except RecordError:
        raise
    except Exception as error:  # Pillow's readers raise many types for damaged files
        raise RecordError(f"image cannot be decoded ({type(error).__name__})") from error


def open_image(data: bytes) -> Image.Image:
    """Read the header of an image file. The pixels are decoded later, by ``load``.

    ``Image.open`` reports a size above its limit through a warning, and a warning becomes an error only through
    filters, which are global to the process. This function opens the file with the same readers and checks the size
    itself, so it changes no global state and is safe on any thread.
    """
    for name in known_formats():
        reader, accepts = Image.OPEN[name]
        accepted = accepts is None or accepts(data[:16])
        if not accepted or isinstance(accepted, str):  # text: the format is known, but this build cannot read it
            continue
        try:
            image = reader(io.BytesIO(data), "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # not a file of this format
            continue
        _check_pixels(image)
        return image
    raise RecordError("image cannot be decoded (unknown format)")


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > PIXEL_LIMIT:
        raise RecordError(f"image cannot be decoded (more than {PIXEL_LIMIT:,} pixels)")


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Return the formats of `FORMATS` that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def upright(image: Image.Image) -> Image.Image:
    """Rotate an image as its EXIF orientation tag says. A damaged tag is ignored."""
    try:
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return image
    return image if turn is None else image.transpose(turn)


def on_white(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to upright RGB. Transparency is laid on white, and 16-bit grey becomes 8-bit.

    Pillow itself clips values above 255, which would make 16-bit pictures white. Raises `RecordError` for 32-bit values
    outside 0 to 255, because their range is unknown.
    """
    image.load()
    image = upright(image)
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("RGB")
    if image.mode in ("I", "F"):
        low, high = cast(tuple[float, float], image.getextrema())
        if low < 0 or high > 255:
            raise RecordError("image has 32-bit numbers outside 0 to 255")
    if image.mode in ("RGBa", "La"):  # premultiplied alpha
        image = image.convert({"RGBa": "RGBA", "La": "LA"}[image.mode])
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")


def random_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: random.Random
) -> Box:
    """Return a random crop as (left, top, right, bottom).

    Its area, as a share of the image, is uniform within `scale`. The logarithm of width / height is uniform within
    `ratio`. After ten failed tries it is the largest centred crop with an allowed ratio.

    >>> random_box(100, 50, (1.0, 1.0), (2.0, 2.0), random.Random(0))
    (0, 0, 100, 50)
    """
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    aspect = min(max(width / height, ratio[0]), ratio[1])
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_box(width: int, height: int) -> Box:
    """Return the largest centred square."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def to_tensor(image: Image.Image, box: Box, size: int) -> Tensor:
    """Return the part of the image inside the box, resized: uint8 (3, size, size)."""
    small = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    flat = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return flat.view(size, size, 3).permute(2, 0, 1).contiguous()
