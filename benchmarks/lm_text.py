"""The text that `benchmarks.lm_figures` trains on, as numbers; also in a file, for another machine."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from examples import train_lm
from examples.train_lm import Settings
from torch import Tensor

TEXTS = ("pretraining", "tuning")


def read_tokens(arguments: argparse.Namespace, settings: Sequence[Settings]) -> tuple[list[Tensor], dict[str, Any]]:
    """(tokens,) of both texts, and what the report says about them."""
    if arguments.data:
        with numpy.load(arguments.data) as file:
            tokens = [unpack(file[name]) for name in TEXTS]
            described = json.loads(str(file["described"]))
        if described["vocabulary"] != settings[0].vocabulary:
            raise SystemExit(
                f"{arguments.data} has a vocabulary of {described['vocabulary']:,}, and the model one of "
                f"{settings[0].vocabulary:,}. Prepare it again, with the same --small"
            )
        return tokens, described
    library, *others = train_lm.default_folders()
    folders = [[folder] for folder in arguments.text] if arguments.text else [[library, *others[1:]], others[:1]]
    texts = [train_lm.read_texts(some, arguments.megabytes) for some in folders]
    tokenizer = train_lm.open_tokenizer([*texts[0], *texts[1]], settings[0].vocabulary, arguments.cache)
    tokens = []
    for some, s, most in zip(texts, settings, arguments.tokens, strict=True):
        steps = s.steps * s.batch * s.length  # more than is trained on is of no use, unless it is for another machine
        wanted = most if arguments.prepare else min(most, 3 * steps)
        tokens.append(train_lm.encode(some, tokenizer, wanted + s.held_out))
    described = {
        "vocabulary": settings[0].vocabulary,
        "folders": [[folder.name for folder in some] for some in folders],
        "characters": [sum(map(len, some)) for some in texts],
        "tokens": [len(some) for some in tokens],
        "sha256": hashlib.sha256(b"".join(some.numpy().tobytes() for some in tokens)).hexdigest(),
    }
    return tokens, described


def pack(tokens: Tensor) -> Any:
    """(3, tokens) bytes, the lowest first: they compress better apart."""
    values = tokens.numpy()
    return numpy.stack([(values >> shift & 255).astype(numpy.uint8) for shift in (0, 8, 16)])


def unpack(parts: Any) -> Tensor:
    """What `pack` was given."""
    return sum(torch.from_numpy(part).long() << shift for part, shift in zip(parts, (0, 8, 16), strict=True))


def prepare(arguments: argparse.Namespace, settings: Sequence[Settings]) -> Path:
    """Write both texts as numbers."""
    path: Path = arguments.prepare
    tokens, described = read_tokens(arguments, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        parts = {name: pack(some) for name, some in zip(TEXTS, tokens, strict=True)}
        numpy.savez_compressed(file, described=numpy.array(json.dumps(described)), **parts)
    print(f"wrote {path}: {' and '.join(f'{len(some):,}' for some in tokens)} tokens, {path.stat().st_size:,} bytes")
    return path
