"""A classifier without training examples: classes are words, and an icon belongs to the nearest of them.

python examples/zero_shot.py          # two cores: less than a minute, nothing is downloaded
"""

import zlib

import torch
from contrastive import WORDS, tensors
from contrastive import main as train

import tilewise as tw
from tilewise.train.icons import load_icons

CLASSES = ("arrow", "battery", "calendar", "circle", "clock", "cloud", "file", "folder", "heart", "mail", "map", "user")


def main(argv: list[str] | None = None) -> dict[int, float]:
    model, _ = train(argv)  # examples/contrastive.py: it has never seen the icons that are classified here
    icons = load_icons().split("test")
    kept = [i for i, caption in enumerate(icons.captions) if len(set(caption.split()) & set(CLASSES)) == 1]
    target = torch.tensor([next(k for k, c in enumerate(CLASSES) if c in icons.captions[i].split()) for i in kept])
    words = torch.tensor([[1 + zlib.crc32(name.encode()) % (WORDS - 1)] for name in CLASSES])

    pictures, captions = tensors(icons)
    with torch.no_grad():
        image, _, scale = model(pictures[kept], captions[kept])
        classifier = torch.nn.functional.normalize(model.text(words), dim=1)  # (classes, d): one row for each word

    # Rank 0 is the right class. With a million classes this would take as little memory.
    found = tw.recall_at_k(tw.retrieval_ranks(image, classifier, target), ks=(1, 3))
    stats = tw.linear_token_stats(image, classifier, target, logit_scale=scale)
    print(f"{len(kept)} icons, {len(CLASSES)} classes; always the most frequent class: {frequent(target):.1%}")
    print(f"right class first: {found[1]:.1%}, among three: {found[3]:.1%}")
    for k in stats.log_prob.argsort(descending=True)[:5].tolist():
        print(f"  {icons.captions[kept[k]]!r} is {CLASSES[stats.argmax[k]]!r}, p = {stats.log_prob[k].exp():.3f}")
    return found


def frequent(target: torch.Tensor) -> float:
    return (target.bincount().max() / len(target)).item()


if __name__ == "__main__":
    main()
