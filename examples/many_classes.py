"""A margin softmax over many classes: recognize icons by their names, as a face recognizer does people.

python examples/many_classes.py       # two cores: less than a minute, nothing is downloaded
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from tilewise.train.icons import load_icons


def shifted(images: Tensor) -> Tensor:
    """Each icon moved by up to three pixels: (n, 1, s, s)."""
    move = torch.randint(-3, 4, (2,)).tolist()
    return 1 - images[:, None].roll(move, (2, 3)) / 255


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--margin", type=float, default=0.3)
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    icons, found = load_icons(), []
    often = icons.name_ids.bincount()[icons.name_ids] >= 6  # names that several families have
    ids, pictures = icons.name_ids[often].unique(return_inverse=True)[1], icons.images[often]
    new = ids % 5 == 0  # a fifth of the names: people that the recognizer has never seen
    convolutions = (nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2048, 128))
    head = tw.MarginSoftmaxLoss(128, int(ids.max()) + 1, m2=given.margin, logit_scale=16.0)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    images, names = pictures[~new], ids[~new]
    for step in range(given.steps + 1):
        rows = torch.randint(len(images), (256,))
        loss = head(model(shifted(images[rows])), names[rows])
        if step % max(1, given.steps // 3) == 0:
            with torch.no_grad():
                features = F.normalize(model(1 - pictures[new, None] / 255), dim=1)
            nearest = tw.nearest(features, features, 1, exclude=torch.arange(len(features))[:, None]).indices[:, 0]
            found.append((ids[new][nearest] == ids[new]).float().mean().item())
            print(f"step {step}: loss {loss:.2f}, the nearest icon of a new name has that name for {found[-1]:.1%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


if __name__ == "__main__":
    main()
