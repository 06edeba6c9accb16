"""Distil a language model into one of a quarter of its width, on Python's own sources, without any logits.

python examples/distillation.py       # two cores: about two minutes, nothing is downloaded
"""

import argparse

import torch
from language_model import Model, read_tokens
from torch import Tensor

import tilewise as tw

WIDTHS = {"teacher": 128, "student": 32}


def new_text(model: Model, pieces: Tensor) -> float:
    with torch.no_grad():
        stats = tw.linear_token_stats(model(pieces), model.table.weight, pieces, shift=1, want=("log_prob",))
    return -stats.mean("log_prob").item()


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args(argv).steps
    pieces, words = read_tokens()
    (train, new), found = pieces.tensor_split([-min(50, len(pieces) // 5)]), {}
    order = torch.randint(len(train), (steps, 8), generator=torch.Generator().manual_seed(1))

    def fit(name: str, width: int, teacher: Model | None = None) -> Model:
        torch.manual_seed(0)
        model = Model(len(words), width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for rows in order:
            batch, head = train[rows], model.table.weight
            optimizer.zero_grad()
            if teacher is None:
                loss = tw.linear_cross_entropy(model(batch), head, batch, shift=1)
            else:  # KL(teacher || student) and the cross-entropy of the next word, from one pass over the vocabulary
                with torch.no_grad():
                    state = teacher(batch)
                loss = tw.linear_distillation_loss(
                    model(batch), head, state, teacher.table.weight, batch, target_weight=0.1, shift=1
                )
            loss.backward()
            optimizer.step()
        found[name] = new_text(model, new)
        print(f"{name}, {width} features: {found[name]:.3f} nats per word of new text")
        return model

    teacher = fit("teacher", WIDTHS["teacher"])
    fit("student alone", WIDTHS["student"])
    fit("student of the teacher", WIDTHS["student"], teacher)
    return found


if __name__ == "__main__":
    main()
