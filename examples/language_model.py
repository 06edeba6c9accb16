"""A language model with a vocabulary of thousands of words, trained on Python's own sources without its logits.

python examples/language_model.py     # two cores: less than a minute, nothing is downloaded
"""

import argparse
import collections
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewise as tw


def read_tokens(vocabulary: int = 8_000) -> tuple[Tensor, list[str]]:
    """Python's standard library as numbers of words in sequences of 64, and the words. Rare words are number 0."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = re.findall(r"\w+|[^\w\s]|\n +", "".join(file.read_text(encoding="utf-8") for file in files))
    kept = ["?", *(word for word, _ in collections.Counter(words).most_common(vocabulary - 1))]
    number = {word: i for i, word in enumerate(kept)}
    return torch.tensor([number.get(word, 0) for word in words[: len(words) // 64 * 64]]).view(-1, 64), kept


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int = 128):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)  # also the head
        self.layers, self.norm = nn.GRU(width, width, 2, batch_first=True), nn.LayerNorm(width)
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.layers(self.table(tokens))[0])


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    pieces, words = read_tokens()
    (train, new), model, found = pieces.tensor_split([-min(50, len(pieces) // 5)]), Model(len(words)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps + 1):
        if step % max(1, steps // 3) == 0:
            stats = tw.linear_token_stats(model(new), model.table.weight, new, shift=1)
            found.append(-stats.log_prob.mean().item())
            print(f"step {step}: {found[-1]:.2f} nats per word, next word right: {stats.accuracy:.1%}")
        batch = train[torch.randint(len(train), (8,))]
        optimizer.zero_grad()
        tw.linear_cross_entropy(model(batch), model.table.weight, batch, shift=1).backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
