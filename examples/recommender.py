"""A recommender with a softmax over the whole catalogue: which other module will this file import?

python examples/recommender.py        # two cores: less than a minute, nothing is downloaded
"""

import argparse
import collections
import re
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewise as tw


def read_baskets() -> tuple[Tensor, int]:
    """The modules that each source file of torch imports (files, 20), padded with -1, and the number of modules."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(torch.__file__).parent.rglob("*.py"))]
    found = [sorted(set(re.findall(r"^\s*(?:from|import) ([a-z][\w.]*)", text, re.MULTILINE))) for text in texts]
    count = collections.Counter(name for names in found for name in names)
    number = {name: i for i, name in enumerate(sorted(name for name in count if count[name] >= 2))}
    baskets = [torch.tensor([number[name] for name in names if name in number]) for names in found]
    baskets = [basket[torch.randperm(len(basket))][:20] for basket in baskets if len(basket) >= 3]
    padded = nn.utils.rnn.pad_sequence(baskets, batch_first=True, padding_value=-1)
    return padded[torch.randperm(len(padded))], len(number)


def recall(users: Tensor, items: Tensor, bias: Tensor, known: Tensor, missing: Tensor) -> float:
    """Share of files whose missing module is among the first ten. Modules that a file has are no candidates."""
    users, items = torch.cat([users, torch.ones(len(users), 1)], 1), torch.cat([items, bias[:, None]], 1)
    return tw.recall_at_k(tw.retrieval_ranks(users, items, missing, exclude=known))[10]


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    baskets, size = read_baskets()
    known, missing, new = baskets[:, 1:], baskets[:, 0], len(baskets) // 5  # the first of a shuffled basket is missing
    popular = baskets[new:].flatten().add(1).bincount(minlength=size + 1)[1:]
    table = nn.EmbeddingBag(size + 1, 64, padding_idx=0)  # what a file has; row 0 is padding
    items, bias = nn.Parameter(0.1 * torch.randn(size, 64)), nn.Parameter((popular + 1).log())
    optimizer, found = torch.optim.AdamW([*table.parameters(), items, bias], lr=1e-2, weight_decay=0.1), []
    for step in range(steps + 1):
        if step % max(1, steps // 4) == 0:
            users = table(known[:new] + 1) * (step > 0)  # step 0: what is popular, for everyone
            found.append(recall(users, items, bias, known[:new], missing[:new]))
            print(f"step {step}: the module is among the first ten of {size} for {found[-1]:.1%} of new files")
        rows = new + torch.randint(len(baskets) - new, (256,))
        optimizer.zero_grad()
        tw.linear_cross_entropy(table(known[rows] + 1), items, missing[rows], linear_bias=bias).backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
