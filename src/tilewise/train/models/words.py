"""Captions to token numbers without a vocabulary file: words and parts of words, hashed into buckets."""

from __future__ import annotations

import functools
import re
import zlib

import torch
from torch import Tensor

Tokens = dict[str, Tensor]
JOINING = frozenset(("an", "and", "for", "of", "the", "with"))
WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Return the lower-case words and numbers of a caption, without function words.

    >>> words("Arrow-left_circle, 24h with the bell")
    ['arrow', 'left', 'circle', '24h', 'bell']
    """
    return [word for word in WORD.findall(text.lower()) if word not in JOINING]


@functools.lru_cache(maxsize=200_000)
def word_parts(word: str) -> tuple[str, ...]:
    """Return the word and its parts of three to five letters. Marks show both ends of the word.

    >>> word_parts("cart")
    ('<cart>', '<ca', 'car', 'art', 'rt>', '<car', 'cart', 'art>', '<cart', 'cart>')
    """
    marked = f"<{word}>"
    parts = [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1) if n < len(marked)]
    return (marked, *parts)


class PartsTokenizer:
    """Bags of hashed words and word parts, for the demo's text tower.

    Words and their parts use different halves of the table. Bucket 0 is padding.

    Args:
        buckets: rows of the table.
        most_words: maximum number of words of a caption.
        most_parts: maximum number of word parts.
    """

    def __init__(self, buckets: int, most_words: int = 12, most_parts: int = 48) -> None:
        self.buckets, self.most_words, self.most_parts = buckets, most_words, most_parts
        self._cached = functools.lru_cache(maxsize=200_000)(self._numbers)

    def _numbers(self, word: str) -> tuple[int, list[int]]:
        half = self.buckets // 2
        whole, *parts = word_parts(word)
        return (
            1 + zlib.crc32(whole.encode()) % (half - 1),
            [half + zlib.crc32(part.encode()) % half for part in parts],
        )

    def __call__(self, texts: list[str]) -> Tokens:
        """Buckets of words (n, most_words) and of parts (n, most_parts), int64, padded with 0."""
        word_rows, part_rows = [], []
        for text in texts:
            found = [self._cached(word) for word in words(text)[: self.most_words]]
            row = [number for number, _ in found]
            parts = [part for _, numbers in found for part in numbers][: self.most_parts]
            word_rows.append(row + [0] * (self.most_words - len(row)))
            part_rows.append(parts + [0] * (self.most_parts - len(parts)))
        return {
            "words": torch.tensor(word_rows, dtype=torch.int64).view(-1, self.most_words),
            "parts": torch.tensor(part_rows, dtype=torch.int64).view(-1, self.most_parts),
        }


class HashedTokenizer:
    """Sequences of hashed words, for transformers that are trained without a tokenizer of their own.

    Token numbers: 0 is padding, ``size - 2`` the start, ``size - 1`` the end (as in CLIP). Words are in between.

    Args:
        size: vocabulary.
        length: number of tokens of a sequence.
    """

    def __init__(self, size: int, length: int) -> None:
        self.size, self.length = size, length

    def __call__(self, texts: list[str]) -> Tokens:
        """``input_ids`` and ``attention_mask``, int64 (n, length).

        >>> HashedTokenizer(100, 5)(["a cart"])["attention_mask"].tolist()
        [[1, 1, 1, 1, 0]]
        """
        ids = torch.zeros(len(texts), self.length, dtype=torch.int64)
        for row, text in enumerate(texts):
            hashed = [1 + zlib.crc32(word.encode()) % (self.size - 3) for word in words(text)[: self.length - 2]]
            numbers = [self.size - 2, *hashed, self.size - 1]
            ids[row, : len(numbers)] = torch.tensor(numbers)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}
