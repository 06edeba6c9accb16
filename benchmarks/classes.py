"""A margin softmax over millions of classes on one card: time, memory, and how close the gradients are.

    python -m benchmarks.classes                   4,096 x 512 against 10,000,000 classes: 40 seconds, 60 GiB
    python -m benchmarks.classes --device cpu --classes 20000 --rows 256

Prints a line of JSON. `share` is the part of the rate of a plain product that the step reaches, counting four products
of all embeddings with all classes: the scores, the scores again in backward, and two gradients. A step with
`sample_rate` is timed as well; its gradient is sparse.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from benchmarks.measure import Failure, Step, cuda_peak_bytes, sustained_rate, time_in_turns

WIDTH, SCALE, RATE = 512, 64.0, 0.1
CHECKED = 256  # classes whose gradient is compared; no row has one of them as its target
CHUNK = 2**17  # classes that the comparison scores at once


def expected(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the first classes, from scores in float32."""
    rows = F.normalize(x.detach().float(), dim=1)
    angle = (rows * F.normalize(weight.detach()[target].float(), dim=1)).sum(1).double().clamp(-1, 1).acos()
    right = (SCALE * torch.cos(angle + 0.5)).float()
    lse = right.clone()
    for first in range(0, len(weight), CHUNK):
        part = F.normalize(weight.detach()[first : first + CHUNK].float(), dim=1)
        scores = SCALE * rows @ part.T
        here = ((target >= first) & (target < first + CHUNK)).nonzero().squeeze(1)
        scores[here, target[here] - first] = -torch.inf  # in its place: the score with the margin
        lse = torch.logaddexp(lse, scores.logsumexp(1))
    few = weight.detach()[:CHECKED].float().requires_grad_()
    (SCALE * rows @ F.normalize(few, dim=1).T - lse[:, None]).exp().sum(1).mean().backward()
    assert few.grad is not None
    return (lse - right).mean(), few.grad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=10_000_000)
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    # As in training: an embedding is close to its class.
    weight = torch.randn(given.classes, WIDTH, device=device, dtype=dtype).requires_grad_()
    target = torch.randint(CHECKED, given.classes, (given.rows,), device=device)
    x = (weight.detach()[target] + 2 * torch.randn(given.rows, WIDTH, device=device).to(dtype)).requires_grad_()

    def step(**more: Any) -> Step:
        return Step(lambda: tw.margin_softmax_loss(x, weight, target, logit_scale=SCALE, **more), [x, weight])

    whole, sampled = step(), step(sample_rate=RATE, sparse_grad=True)
    loss, (want, first) = whole(), expected(x, weight, target)
    assert weight.grad is not None
    errors = {"loss": abs(loss.item() / want.item() - 1)}
    errors["gradient"] = ((weight.grad[:CHECKED].float() - first).norm() / first.norm()).item()
    whole.clear()
    result: dict[str, Any] = {"rows": given.rows, "features": WIDTH, "classes": given.classes, "type": str(dtype)}
    result |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "errors": errors}
    if device.type == "cuda":
        result["bytes"] = {"all": cuda_peak_bytes(whole, device), "sampled": cuda_peak_bytes(sampled, device)}
        sampled.clear()
    rate = sustained_rate(device)
    for name, one in (("all", whole), ("sampled", sampled)):  # one after the other: the gradients take much memory
        time = time_in_turns({name: one}, device, repeats=5)[name]
        one.clear()
        assert not isinstance(time, Failure), time.reason
        result[name] = dataclasses.asdict(time)
        products = 8 * given.rows * WIDTH * given.classes * (1 if name == "all" else RATE)
        result[name]["share"] = products / (rate * 1e-3 * time.median_ms)
    print(json.dumps(result | {"rate_tflops": rate / 1e12}))


if __name__ == "__main__":
    main()
