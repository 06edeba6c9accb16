"""A teacher learns from 32,261 captioned icons, and students of a quarter of its width from 3,000 and the teacher.

python examples/clip_distillation.py  # two cores: about a minute, nothing is downloaded
"""

import argparse

import torch
from contrastive import Towers, tensors
from torch import Tensor

import tilewise as tw
from tilewise.train.icons import load_icons

METHODS = ("student alone", "student with its teacher", "student with its teacher and unpaired icons")


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=3000, help="icons with captions, for the student")
    parser.add_argument("--seeds", type=int, default=3, help="students of each kind")
    given, found = parser.parse_args(argv), {}
    (pictures, words), new = (tensors(load_icons().split(side)) for side in ("train", "test"))

    def fit(name: str, width: int, pairs: int, seed: int = 0, teacher: tuple[Tensor, ...] | None = None) -> Towers:
        torch.manual_seed(seed)
        model, labelled = Towers(width, 4 * width), torch.randperm(len(words))[:pairs]
        torch.nn.init.normal_(model.text.weight, std=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
        for _ in range(given.steps):
            rows, other = labelled[torch.randint(pairs, (512,))], torch.randint(len(words), (2, 512))
            student = model(pictures[rows], words[rows])
            loss = tw.clip_loss(*student)
            if teacher is not None:
                i, j = other if name == METHODS[2] else (rows, rows)
                if name == METHODS[2]:  # any pictures and any captions: the teacher's scores are the target
                    student = model(pictures[i], words[j])
                loss = loss + tw.clip_distillation_loss(*student, teacher[0][i], teacher[1][j], teacher[2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            image, text, _ = model(*new)
        found.setdefault(name, []).append(tw.recall_at_k(tw.retrieval_ranks(text, image))[10])
        print(f"{name}: icon among the first ten for {found[name][-1]:.1%} of new captions")
        return model

    teacher = tuple(x.detach() for x in fit("teacher", 128, len(words))(pictures, words))
    for k in range(len(METHODS) * given.seeds):
        fit(METHODS[k % 3], 32, given.pairs, k // 3, teacher if k % 3 else None)
    return found


if __name__ == "__main__":
    main()
