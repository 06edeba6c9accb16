"""Check that all ranks make the same call, before any block is sent.

One small all-gather exchanges the shard sizes and a text description of the call. Every rank compares all
descriptions. If they differ, every rank raises the same `GroupError` and no transfer is pending.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping

import torch

from tilewise.errors import GroupError, TilewiseError
from tilewise.ring.exchange import Exchange
from tilewise.ring.schedule import Shards

TEXT_WORDS = 128  # int64 words: the length, then up to 1,016 bytes of description
PACKED = f"<{TEXT_WORDS - 1}q"


def agree(
    exchange: Exchange, rows: int, cols: int, call: Mapping[str, object], device: torch.device | None = None
) -> Shards:
    """Exchange the shard sizes of all ranks, and raise `GroupError` if the ranks describe different calls.

    Args:
        exchange: the group.
        rows, cols: sizes of this rank's shard. They may differ between ranks.
        call: names and values that must be equal on every rank.
        device: that of the tensors that will be sent, if any. All ranks raise `GroupError` if the group cannot.
    """
    if exchange.world == 1:
        return Shards(exchange.rank, (rows,), (cols,))
    text = {name: str(value) for name, value in call.items()}
    refusal = None if device is None else exchange.refuses(device)
    if device is not None:
        text["device"] = device.type if refusal is None else "one that cannot travel"
    found = exchange.gather([rows, cols, *to_words(json.dumps(text))])
    calls = [json.loads(from_words(numbers[2:])) for numbers in found]
    if any(other != text for other in calls):
        raise GroupError(disagreement(calls))
    if refusal is not None:
        raise GroupError(f"tensors on {device} cannot be sent in this group: {refusal}")
    return Shards(exchange.rank, tuple(numbers[0] for numbers in found), tuple(numbers[1] for numbers in found))


@contextlib.contextmanager
def propagate_errors(exchange: Exchange) -> Iterator[None]:
    """Propagate a validation error of this rank to the other ranks, so that all of them raise.

    The other ranks receive the message in their next `agree` and raise a `GroupError`. Without this they would block
    until the group's timeout.
    """
    try:
        yield
    except TilewiseError as error:
        message = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
        message = "".join(char if char.isprintable() else " " for char in message)  # JSON escapes take six bytes
        with contextlib.suppress(GroupError):
            agree(exchange, 0, 0, {"call": message[:400]})
        raise


def disagreement(calls: list[dict[str, str]]) -> str:
    """Message that says which values differ and on which ranks.

    >>> print(disagreement([{"width": "32"}, {"width": "64"}, {"width": "32"}]))
    ranks of the group disagree on width: 32 on ranks 0, 2 but 64 on rank 1. Every rank must call the same losses in
    the same order, with the same arguments and options, on features of one width and type; nothing was sent
    """
    names = sorted({name for call in calls for name in call})
    if len({call.get("call") for call in calls}) > 1:
        names = ["call"]  # the other values of different calls are not comparable
    parts = []
    for name in names:
        values = [call.get(name, "nothing") for call in calls]
        if len(set(values)) > 1:
            holders: dict[str, list[int]] = {}
            for rank, value in enumerate(_without_common(values)):
                holders.setdefault(value, []).append(rank)
            ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            values_by_rank = " but ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ordered)
            parts.append(f"{name}: {values_by_rank}")
    return (
        f"ranks of the group disagree on {'; on '.join(parts)}. Every rank must call the same losses in the same "
        "order, with the same arguments and options, on features of one width and type; nothing was sent"
    )


def _without_common(values: list[str]) -> list[str]:
    """Remove from "name=value name=value" strings the settings that all of them share.

    >>> _without_common(["backend=auto workspace_mib=64", "backend=auto workspace_mib=128"])
    ['workspace_mib=64', 'workspace_mib=128']
    """
    words = [value.split() for value in values]
    common = {word for word in set.intersection(*map(set, words)) if "=" in word}
    return [" ".join(word for word in own if word not in common) or "nothing" for own in words]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def to_words(text: str) -> list[int]:
    """Encode text as `TEXT_WORDS` integers: the length in bytes, then eight bytes per integer.

    >>> from_words(to_words("width 32"))
    'width 32'
    """
    data = text.encode()
    assert len(data) <= 8 * (TEXT_WORDS - 1), text
    return [len(data), *struct.unpack(PACKED, data.ljust(8 * (TEXT_WORDS - 1), b"\0"))]


def from_words(words: list[int]) -> str:
    """Decode the result of `to_words`."""
    return struct.pack(PACKED, *words[1:])[: words[0]].decode()
