"""Ranks tell one another what they are about to do, and stop together if they differ.

One small all-gather before anything else is sent: sizes of all shards, and a description of the call as text. Every
rank sees every description, so every rank raises the same `GroupError`, and nothing is left under way.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from tilewise.errors import GroupError, TilewiseError
from tilewise.ring.exchange import Exchange
from tilewise.ring.shards import Shards

TEXT_WORDS = 128  # int64 words: 1,016 bytes of description and their length


def agree(exchange: Exchange, rows: int, cols: int, call: Mapping[str, object]) -> Shards:
    """Sizes of all shards, once all ranks describe the call alike.

    Args:
        exchange: the group.
        rows, cols: of this rank; may differ between ranks.
        call: what must be the same on every rank, as names and values.
    """
    text = {name: str(value) for name, value in call.items()}
    if exchange.world == 1:
        return Shards(exchange.rank, (rows,), (cols,))
    found = exchange.gather([rows, cols, *to_words(json.dumps(text))])
    calls = [json.loads(from_words(numbers[2:])) for numbers in found]
    if any(other != text for other in calls):
        raise GroupError(disagreement(calls))
    return Shards(exchange.rank, tuple(numbers[0] for numbers in found), tuple(numbers[1] for numbers in found))


@contextlib.contextmanager
def telling(exchange: Exchange) -> Iterator[None]:
    """What this rank refuses, the others hear at their next `agree`, instead of waiting for it in vain."""
    try:
        yield
    except TilewiseError as error:
        said = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
        said = "".join(char if char.isprintable() else " " for char in said)  # a control character takes six bytes
        with contextlib.suppress(GroupError):
            agree(exchange, 0, 0, {"call": said[:400]})
        raise


def disagreement(calls: list[dict[str, str]]) -> str:
    """What differs, and on which ranks.

    >>> print(disagreement([{"width": "32"}, {"width": "64"}, {"width": "32"}]))
    ranks of the group disagree on width: 32 on ranks 0, 2 but 64 on rank 1. Every rank must call the same losses in
    the same order, with the same arguments and options, on features of one width and type; nothing was sent
    """
    names = sorted({name for call in calls for name in call})
    if len({call.get("call") for call in calls}) > 1:
        names = ["call"]  # different calls have nothing else to compare
    parts = []
    for name in names:
        values = [call.get(name, "nothing") for call in calls]
        if len(set(values)) > 1:
            holders: dict[str, list[int]] = {}
            for rank, value in enumerate(_without_common(values)):
                holders.setdefault(value, []).append(rank)
            ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            said = " but ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ordered)
            parts.append(f"{name}: {said}")
    return (
        f"ranks of the group disagree on {'; on '.join(parts)}. Every rank must call the same losses in the same "
        "order, with the same arguments and options, on features of one width and type; nothing was sent"
    )


def _without_common(values: list[str]) -> list[str]:
    """Settings, "name=value name=value", less those that are the same everywhere.

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
    """Text as `TEXT_WORDS` integers: its length in bytes, then eight bytes in each.

    >>> from_words(to_words("width 32"))
    'width 32'
    """
    data = text.encode()
    assert len(data) <= 8 * (TEXT_WORDS - 1), text
    padded = data.ljust(8 * (TEXT_WORDS - 1), b"\0")
    words = [int.from_bytes(padded[k : k + 8], "little", signed=True) for k in range(0, len(padded), 8)]
    return [len(data), *words]


def from_words(words: list[int]) -> str:
    """Undo `to_words`."""
    data = b"".join(word.to_bytes(8, "little", signed=True) for word in words[1:])
    return data[: words[0]].decode()
