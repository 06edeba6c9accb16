"""The default workspace on a CUDA device: the memory that `explain` says, and the same bits on a full card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.gpu import checks
from torch import Tensor

import tilewise as tw
from tilewise.ops import budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GIB = 2**30
# Tokens, classes and features of heads of language models
HEADS = (
    (65536, 128256, 2048),
    (16384, 262144, 1152),
    (65536, 151936, 1024),
    (8192, 128256, 4096),
    (2048, 128256, 4096),
)


def head(n: int, classes: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, classifier and targets."""
    chance = torch.Generator("cuda").manual_seed(n)
    hidden = torch.randn(n, d, device="cuda", generator=chance).bfloat16().requires_grad_()
    weight = torch.randn(classes, d, device="cuda", generator=chance).div(d**0.5).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(classes, (n,), device="cuda", generator=chance)


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_a_loss_takes_the_memory_that_explain_says(sizes: tuple[int, int, int]) -> None:
    """Within 5 %: neither more, nor a bound that is too high to plan with. No token is ignored, so none are copied."""
    n, classes, d = sizes
    needed = 6 * (n + classes) * d + 10 * GIB
    if budget.free_bytes(torch.device("cuda")) < needed:
        pytest.skip("too little memory is free on the card")
    hidden, weight, target = head(*sizes)
    (found,) = tw.explain(tw.linear_cross_entropy, hidden, weight, target).calls
    peak = checks.peak_bytes(
        lambda: torch.autograd.grad(tw.linear_cross_entropy(hidden, weight, target), (hidden, weight))
    )
    said = found.peak_bytes - found.copy_bytes
    assert 0.95 < peak / said < 1.05, (peak / 2**20, said / 2**20)


def calls(wrap: Callable[..., Any] = lambda loss: loss) -> dict[str, Callable[[], list[Tensor]]]:
    """Losses whose speed depends on scratch memory, with the results and gradients of each."""
    hidden, weight, target = head(4096, 50_000, 1024)
    other = head(4096, 50_000, 1024)[0].detach().flip(0)
    wide = torch.nn.functional.normalize(torch.cat([hidden, other]).detach().reshape(-1, 256)[:16384])
    unit, pairs = wide.requires_grad_(), wide.detach().flip(0)

    def solved(loss: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], list[Tensor]]:
        made = wrap(loss)
        return lambda: [(value := made(*leaves)).detach(), *torch.autograd.grad(value, leaves)]

    def tokens(x: Tensor, w: Tensor) -> Tensor:
        found = tw.linear_token_stats(x, w, target, want=("log_prob", "entropy"))
        assert found.log_prob is not None
        assert found.entropy is not None
        return found.log_prob.sum() + 0.1 * found.entropy.sum()

    return {
        "cross_entropy": solved(lambda x, w: tw.linear_cross_entropy(x, w, target), hidden, weight),
        "tokens": solved(tokens, hidden, weight),
        "distillation": solved(lambda x, w: tw.linear_distillation_loss(x, w, other, weight.detach()), hidden, weight),
        "clip": solved(lambda x: tw.clip_loss(x, pairs, 20.0), unit),
        "siglip": solved(lambda x: tw.siglip_loss(x, pairs, 10.0, -10.0), unit),
        "nt_xent": solved(tw.nt_xent, unit),
    }


@pytest.fixture
def fill_the_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Leaves this process so many bytes, and lets the driver say so. Other processes keep their memory."""

    def fill(left: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        share = (torch.cuda.memory_reserved() + left) / total
        torch.cuda.set_per_process_memory_fraction(share)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (left, total))

    yield fill
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_same_bits_on_a_full_card(compiled: bool, fill_the_card: Callable[[int], None]) -> None:
    device = torch.device("cuda")
    wrap = (lambda loss: torch.compile(loss, fullgraph=True)) if compiled else (lambda loss: loss)
    torch._dynamo.reset()
    before = budget.budget_mib(budget.free_bytes(device) or 0)
    empty = {name: call() for name, call in calls(wrap).items()}
    torch._dynamo.reset()  # nothing is kept from the calls on the empty card
    made = calls(wrap)
    fill_the_card(2 * GIB)
    assert budget.budget_mib(budget.free_bytes(device) or 0) < before  # "auto" would take less
    for name, call in made.items():
        assert all(map(torch.equal, call(), empty[name])), name
        assert all(value.isfinite().all() and value.norm() > 0 for value in empty[name]), name
