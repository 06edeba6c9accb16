"""Encoded pictures of one colour, and a stream of batches over any source."""

import io

import torch
from PIL import Image

from tilewise.train.data import BatchStream, SkipLog


def picture(colour=(200, 10, 10), size=(24, 16), kind="PNG", mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


def tokens(texts):
    return {"ids": torch.tensor([[len(t)] for t in texts], dtype=torch.int64).view(-1, 1)}


def stream(source, batch_size, **extra):
    given_ = {"seed": 0, "rank": 0, "world": 1, "skips": SkipLog(), "prefetch": 0, **extra}
    return BatchStream(source, tokens, batch_size=batch_size, **given_)
