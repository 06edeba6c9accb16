"""CLIP on the icons that ship: train two small towers, then find icons of a family that was not trained on.

python examples/contrastive.py        # two cores: less than a minute, nothing is downloaded
"""

import argparse
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from tilewise.train.icons import IconSet, load_icons
from tilewise.train.models.icon import IconFeatures

WORDS = 2**14  # rows of the table of words


class Towers(nn.Module):
    def __init__(self, width: int = 128, hidden: int = 256):
        super().__init__()
        self.image = nn.Sequential(nn.LayerNorm(896), nn.Linear(896, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.text = nn.EmbeddingBag(WORDS, width, padding_idx=0)
        self.log_scale = nn.Parameter(torch.tensor([2.66]))

    def forward(self, pictures: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(pictures), dim=1), F.normalize(self.text(words), dim=1), self.log_scale.exp()[0]


def tensors(icons: IconSet) -> tuple[Tensor, Tensor]:
    """Fixed features of the drawings (n, 896), and numbers of the words of each caption (n, 8)."""
    pictures = torch.cat([IconFeatures()(1 - part[:, None] / 255) for part in icons.images.split(4096)])
    words = [[1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.split()[:8]] for text in icons.captions]
    return pictures, torch.tensor([row + [0] * (8 - len(row)) for row in words])


def main(argv: list[str] | None = None) -> tuple[Towers, list[float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    icons, model, recalls = load_icons(), Towers(), []
    (pictures, words), new = tensors(icons.split("train")), tensors(icons.split("test"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        rows = torch.randint(len(words), (1024,))
        loss = tw.clip_loss(*model(pictures[rows], words[rows]))  # 1024 x 1024 scores, none of them stored
        if step % max(1, steps // 4) == 0:
            recalls.append(tw.recall_at_k(tw.retrieval_ranks(*model(*new)[1::-1]))[10])  # texts, then images
            print(f"step {step}: loss {loss:.2f}, icon among the first ten for {recalls[-1]:.1%} of new captions")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, recalls


if __name__ == "__main__":
    main()
