"""Dense retrieval with hard negatives: find the rest of a docstring by its first line.

python examples/retrieval.py          # two cores: less than a minute, nothing is downloaded
"""

import argparse
import re
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw


def read_pairs() -> tuple[Tensor, Tensor, Tensor]:
    """First lines of the docstrings of torch, their other lines, and the number of the file of each."""
    found = {}
    for file, path in enumerate(sorted(Path(torch.__file__).parent.rglob("*.py"))):
        found |= dict.fromkeys(re.findall(r'"""([A-Z][^"\n]{20,})\n([^"]{80,}?)"""', path.read_text("utf-8")), file)
    return *(numbers(texts) for texts in zip(*found, strict=True)), torch.tensor(list(found.values()))


def numbers(texts: tuple[str, ...]) -> Tensor:
    rows = [[1 + zlib.crc32(w.encode()) % (2**15 - 1) for w in re.findall(r"\w+", t.lower())[:48]] for t in texts]
    return torch.tensor([row + [0] * (48 - len(row)) for row in rows])


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    query, document, file = read_pairs()
    new, train = torch.randperm(len(file)).tensor_split([min(500, len(file) // 5)])  # a fifth of a few pairs
    same_file = [train[file[train] == i] for i in range(int(file.max()) + 1)]  # alike, so they make hard negatives
    table = nn.EmbeddingBag(2**15, 256, padding_idx=0)
    optimizer, found = torch.optim.AdamW(table.parameters(), lr=2e-2), []
    for step in range(steps + 1):
        if step % max(1, steps // 3) == 0:
            ranks = tw.retrieval_ranks(F.normalize(table(query[new])), F.normalize(table(document)), new)
            found.append(tw.recall_at_k(ranks, ks=(10,))[10])
            print(f"step {step}: the document is among the first ten of {len(file)} for {found[-1]:.1%} of new queries")
        rows = train[torch.randint(len(train), (256,))]
        alike = [same_file[i] for i in file[rows].tolist()]
        hard = torch.stack([some[torch.randint(len(some), (4,))] for some in alike])
        q, k = F.normalize(table(query[rows])), F.normalize(table(document[rows]))
        negatives = F.normalize(table(document[hard.flatten()])).view(256, 4, 256)
        optimizer.zero_grad()
        real = hard != rows[:, None]  # a document is no negative of its own query
        tw.info_nce(q, k, negatives, temperature=0.05, query_ids=rows, negative_mask=real).backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
