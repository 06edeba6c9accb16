"""SimCLR on the icons that ship: learn without captions, then find the same icon in another family.

python examples/simclr.py             # two cores: less than a minute, nothing is downloaded
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from tilewise.train.icons import load_icons

HELD_OUT = ("lucide", "tabler")  # two families of icons that are not trained on


def view(images: Tensor) -> Tensor:
    """Shift, scale and turn each icon at random, and make its strokes thicker or thinner: (n, 1, s, s)."""
    ink = 1 - images[:, None] / 255
    thick, thin = F.max_pool2d(ink, 3, 1, 1), -F.max_pool2d(-ink, 3, 1, 1)
    strength = 2 * torch.rand(len(ink), 1, 1, 1) - 1
    ink = torch.lerp(ink, torch.where(strength > 0, thick, thin), strength.abs())
    angle, size = 0.3 * torch.randn(len(ink)), 1 + 0.15 * torch.randn(len(ink))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2) * size[:, None, None]
    grid = F.affine_grid(torch.cat([turn, 0.1 * torch.randn(len(ink), 2, 1)], 2), ink.shape, align_corners=False)
    return F.grid_sample(ink, grid, align_corners=False)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    icons, found = load_icons(), []
    queries, gallery = (torch.tensor([family == name for family in icons.families]) for name in HELD_OUT)
    images, ids = icons.images[~(queries | gallery)], icons.name_ids
    convolutions = (nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2048, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps + 1):
        rows = torch.randint(len(images), (256,))
        views = torch.cat([view(images[rows]), view(images[rows])])  # first views, then second views
        loss = tw.nt_xent(F.normalize(model(views), dim=1), temperature=0.2)
        if step % max(1, steps // 3) == 0:
            with torch.no_grad():
                a, b = (F.normalize(model(1 - icons.images[m, None] / 255), dim=1) for m in (queries, gallery))
            ranks = tw.retrieval_ranks(a, b, query_ids=ids[queries], gallery_ids=ids[gallery])
            found.append(tw.recall_at_k(ranks)[10])
            print(f"step {step}: loss {loss:.2f}, the same icon is among the ten nearest for {found[-1]:.1%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
