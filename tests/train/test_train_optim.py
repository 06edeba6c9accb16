import itertools

import pytest
import torch
from tests.compare import relative_error
from torch import nn

from tilewise.errors import ConfigError
from tilewise.train.adafactor import Adafactor
from tilewise.train.config import OptimConfig
from tilewise.train.optim import (
    AveragedWeights,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)


def adafactor_by_the_book(weight, grads, lr, beta1, cap, decay):
    """An independent implementation of the equations in the docstring."""
    p, m = weight.double().clone(), torch.zeros_like(weight).bfloat16()
    rows = cols = second = 0.0
    for t, g in enumerate(grads, start=1):
        g = g.double()
        b2 = min(cap, 1 - t**-0.8)
        if p.ndim == 2 and min(p.shape) >= 32:
            rows = b2 * rows + (1 - b2) * (g**2 + 1e-30).mean(1)
            cols = b2 * cols + (1 - b2) * (g**2 + 1e-30).mean(0)
            u = g / (torch.outer(rows, cols) / rows.mean()).sqrt()
        else:
            second = b2 * second + (1 - b2) * (g**2 + 1e-30)
            u = g / second.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        exact = beta1 * m.double() + (1 - beta1) * u
        m = exact.bfloat16()
        p = p - lr * (exact + decay * p)
    return p


@pytest.mark.parametrize("shape", [(40, 64), (40, 8), (17,), ()])
def test_adafactor_follows_its_equations(shape):
    torch.manual_seed(0)
    weight, grads = torch.randn(shape), [torch.randn(shape) * 10.0 ** (i - 2) for i in range(5)]
    p = nn.Parameter(weight.clone())
    optimizer = Adafactor([p], lr=0.1, weight_decay=0.01)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    assert relative_error(p.data, adafactor_by_the_book(weight, grads, 0.1, 0.9, 0.95, 0.01)) < 1e-3
    assert relative_error(p.data, weight) > 0.01


def test_adafactor_keeps_little():
    p = nn.Parameter(torch.randn(256, 512))
    p.grad = torch.randn_like(p)
    optimizer = Adafactor([p])
    optimizer.step()
    assert optimizer.state[p]["moment"].dtype == torch.bfloat16
    kept = sum(t.numel() * t.element_size() for t in optimizer.state[p].values())
    assert kept < 1.02 * (2 * p.numel() + 4 * (256 + 512))
    with pytest.raises(ConfigError):
        Adafactor([p], lr=-1.0)


def test_adafactor_learns():
    torch.manual_seed(0)
    layer, target = nn.Linear(32, 32), torch.randn(64, 32)
    x = torch.randn(64, 32)
    optimizer = Adafactor(layer.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (layer(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Module()
        self.scale.log_scale = nn.Parameter(torch.tensor(1.0))


def test_groups_decay_matrices_only_and_share_the_rate():
    optimizer = build_optimizer(Small(), OptimConfig(weight_decay=0.3, scale_lr=0.5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.0]
    set_learning_rate(optimizer, 2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 2.0, 1.0]


def test_schedule_warms_up_peaks_and_ends():
    config = OptimConfig(lr=2.0, warmup_steps=10, final_lr_share=0.1)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_averaged_weights_follow_their_equation_and_come_and_go():
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone()
    average = AveragedWeights(model, 0.9)
    with torch.no_grad():
        model.weight += 1
    average.update(1)
    keep = 2 / 11
    now = model.weight.detach().clone()
    with average.used():
        assert relative_error(model.weight, keep * start + (1 - keep) * now) < 1e-6
    assert torch.equal(model.weight, now)
    average.update(10_000)
    assert relative_error(average.average["weight"], 0.9 * (keep * start + (1 - keep) * now) + 0.1 * now) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_state_survives_a_round_trip(name):
    torch.manual_seed(0)

    def make():
        torch.manual_seed(1)
        model = Small()
        return model, build_optimizer(model, OptimConfig(name=name))

    def step(model, optimizer):
        (model.layer(torch.ones(2, 3)).square().sum() * model.scale.log_scale.exp()).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    kept = {key: value.clone() for key, value in optimizer_tensors(optimizer, model).items()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    step(model, optimizer)
    other, fresh = make()
    other.load_state_dict(weights)
    restore_optimizer(fresh, other, kept)
    step(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
