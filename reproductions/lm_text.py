"""The text that `reproductions.lm_figures` trains on, as tokens. It can be written to a file for another machine.

    pretraining   Python's standard library without its tests, and most files of transformers
    tuning        more files of transformers' models
    held_out      further files of transformers' models: sequences from many of them
    other         sequences from files of torch: text of another kind

No file is in two of them. Files of different models in transformers share much code; `overlap` measures how much.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from examples.train_lm import Settings
from tokenizers import Tokenizer
from torch import Tensor

from examples import train_lm

NAMES = ("pretraining", "tuning", "held_out", "other")
PART_TUNED, PART_HELD_OUT = 5, 8  # 1 of 5 files is not in pretraining; 1 of 8 of those is held out
SEQUENCE = 16  # tokens; a sequence of this length that occurs twice is counted as a copy
Texts = dict[str, list[str]]


# Which files


def default_texts(megabytes: float) -> tuple[Texts, dict[str, str]]:
    """Texts that every installation has, and descriptions of them."""
    library, other, transformers = train_lm.default_folders()
    apart = train_lm.read_texts([transformers / "models"], megabytes)[::PART_TUNED]
    texts = {
        "pretraining": train_lm.read_texts([library, transformers], megabytes),
        "tuning": apart,
        "held_out": apart[::PART_HELD_OUT],
        "other": train_lm.read_texts([other], megabytes),
    }
    tests = train_lm.read_texts([library / "test"], megabytes) if (library / "test").is_dir() else []
    said = {
        "pretraining": "the sources of Python's standard library (without its tests) and most of those of transformers",
        "tuning": "more files of transformers' models",
        "held_out": "other files of transformers' models",
        "other": f"the sources of {other.name}",
    }
    return without_repeats(texts, tests), said


def given_texts(folders: Sequence[Path], megabytes: float) -> tuple[Texts, dict[str, str]]:
    """Texts of a folder for pretraining and of one for fine-tuning. A part of the second is held out."""
    first, second = (train_lm.read_texts([folder], megabytes) for folder in folders)
    texts = {"pretraining": first, "tuning": second, "held_out": second[::PART_HELD_OUT], "other": []}
    names = [folder.name for folder in folders]
    said = {"pretraining": names[0], "tuning": names[1], "held_out": f"other files of {names[1]}", "other": ""}
    return without_repeats(texts, []), said


def without_repeats(texts: Texts, unwanted: Sequence[str]) -> Texts:
    """Remove files from a text that are in a more important one: other, held_out, tuning, pretraining."""
    out, taken = {}, set(unwanted)
    for name in ("other", "held_out", "tuning", "pretraining"):
        out[name] = [text for text in texts[name] if text not in taken]
        taken.update(out[name])
    return {name: out[name] for name in NAMES}


# Tokens


def read_tokens(arguments: argparse.Namespace, settings: Sequence[Settings]) -> tuple[dict[str, Tensor], Any]:
    """The tokens of each text, and their description for the report."""
    if arguments.data:
        with numpy.load(arguments.data) as file:
            if set(NAMES) - set(file.files):
                raise SystemExit(
                    f"{arguments.data} needs the texts {', '.join(NAMES)}, and has {', '.join(file.files)}. "
                    "Write it again with --prepare"
                )
            tokens = {name: unpack(file[name]) for name in NAMES}
            described = json.loads(str(file["described"]))
        if described["vocabulary"] != settings[0].vocabulary:
            raise SystemExit(
                f"{arguments.data} has a vocabulary of {described['vocabulary']:,}, and the model one of "
                f"{settings[0].vocabulary:,}. Write it again with --prepare, and with --small if it is used here"
            )
        return tokens, described
    texts, said = (
        given_texts(arguments.text, arguments.megabytes) if arguments.text else default_texts(arguments.megabytes)
    )
    everything = [text for some in texts.values() for text in some]
    tokenizer = train_lm.open_tokenizer(everything, settings[0].vocabulary, arguments.cache)
    tokens = {}
    for name, s, most in zip(NAMES, settings, arguments.tokens, strict=False):
        steps = s.steps * s.batch * s.length  # another machine may train on more
        tokens[name] = train_lm.encode(texts[name], tokenizer, most if arguments.prepare else min(most, 3 * steps))
    for name in NAMES[2:]:
        tokens[name] = spread(texts[name], tokenizer, settings[0].length, settings[0].held_out)
    described = {
        "vocabulary": settings[0].vocabulary,
        "said": said,
        "files": {name: len(some) for name, some in texts.items()},
        "tokens": {name: len(some) for name, some in tokens.items()},
        "sequence": SEQUENCE,
        "overlap": {name: overlap(tokens[name], tokens["pretraining"]) for name in NAMES[1:]},
        "sha256": hashlib.sha256(b"".join(some.numpy().tobytes() for some in tokens.values())).hexdigest(),
    }
    return tokens, described


def spread(texts: Sequence[str], tokenizer: Tokenizer, length: int, count: int) -> Tensor:
    """About `count` tokens in sequences of `length`, evenly spaced over many files."""
    if not texts:
        return torch.zeros(0, dtype=torch.int64)
    tokens = train_lm.encode(texts, tokenizer, 16 * count)
    length = min(length, len(tokens))
    whole = tokens[: len(tokens) // length * length].view(-1, length)
    places = torch.linspace(0, len(whole) - 1, min(len(whole), max(1, count // length))).long()
    return whole[places].flatten()


def overlap(tokens: Tensor, seen: Tensor) -> float:
    """The share of the short sequences of `tokens` that also occur in `seen`.

    >>> overlap(torch.arange(100, 140), torch.arange(120, 200))  # 5 of 25
    0.2
    """
    own = sums_of_sequences(tokens)
    return float(numpy.isin(own, numpy.unique(sums_of_sequences(seen))).mean()) if len(own) else 0.0


def sums_of_sequences(tokens: Tensor) -> Any:
    """A 64-bit hash of each sequence of SEQUENCE tokens."""
    values = tokens.numpy().astype(numpy.uint64)
    total = numpy.zeros(max(0, len(values) - SEQUENCE + 1), numpy.uint64)
    for shift in range(SEQUENCE):
        total = total * numpy.uint64(6_364_136_223_846_793_005) + values[shift : shift + len(total)]
    return total


def pack(tokens: Tensor) -> Any:
    """(3, tokens): the bytes of each token, lowest first. They compress better separately."""
    values = tokens.numpy()
    return numpy.stack([(values >> shift & 255).astype(numpy.uint8) for shift in (0, 8, 16)])


def unpack(parts: Any) -> Tensor:
    """The inverse of `pack`."""
    return sum(torch.from_numpy(part).long() << shift for part, shift in zip(parts, (0, 8, 16), strict=True))


def prepare(arguments: argparse.Namespace, settings: Sequence[Settings]) -> Path:
    """Write the tokens of all texts to a file. Returns its path."""
    path: Path = arguments.prepare
    tokens, described = read_tokens(arguments, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        parts = {name: pack(some) for name, some in tokens.items()}
        numpy.savez_compressed(file, described=numpy.array(json.dumps(described)), **parts)
    counts = ", ".join(f"{name} {len(some):,}" for name, some in tokens.items())
    copied = ", ".join(f"{name} {100 * share:.1f} %" for name, share in described["overlap"].items())
    print(f"wrote {path}: {path.stat().st_size:,} bytes; tokens: {counts}; of which also in pretraining: {copied}")
    return path
