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
    lists = [torch.tensor([number[name] for name in names if name in number]) for names in found]
    kept = [lists[i][torch.randperm(len(lists[i]))][:20] for i in torch.randperm(len(lists)) if len(lists[i]) > 2]
    return nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=-1), len(number)


def recall(users: Tensor, items: Tensor, bias: Tensor, baskets: Tensor) -> float:
    """Share of files whose first module is among the best ten. The other modules of a file are no candidates."""
    users, items = torch.cat([users, torch.ones(len(users), 1)], 1), torch.cat([items, bias[:, None]], 1)
    return tw.recall_at_k(tw.retrieval_ranks(users, items, baskets[:, 0], exclude=baskets[:, 1:]))[10]


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    baskets, size = read_baskets()
    new, train = baskets.tensor_split([len(baskets) // 5])
    popular = train.flatten().add(1).bincount(minlength=size + 1)[1:]
    table = nn.EmbeddingBag(size + 1, 64, padding_idx=0)  # what a file has; row 0 is padding
    items, bias = nn.Parameter(0.1 * torch.randn(size, 64)), nn.Parameter((popular + 1).log())
    optimizer, found = torch.optim.AdamW([*table.parameters(), items, bias], lr=5e-3, weight_decay=0.1), []
    for step in range(steps + 1):
        if step % max(1, steps // 4) == 0:  # step 0: what is popular, for everyone
            found.append(recall(table(new[:, 1:] + 1) * (step > 0), items, bias, new))
            print(f"step {step}: the module is among the first ten of {size} for {found[-1]:.1%} of new files")
        batch = train[torch.randint(len(train), (256,))]
        hidden = torch.multinomial((batch >= 0).float(), 1)  # the place of one module of each file
        known, missing = batch.scatter(1, hidden, -1), batch.gather(1, hidden)[:, 0]
        optimizer.zero_grad()
        tw.linear_cross_entropy(table(known + 1), items, missing, linear_bias=bias).backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
