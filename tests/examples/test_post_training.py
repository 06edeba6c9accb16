"""The recipes of examples/post_training.py against naive implementations on stored logits, in float64.

The naive side loops over sequences and tokens in Python, as the papers write their equations.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.compare import assert_close
from torch import Tensor

import tilewise as tw
from examples import post_training as recipes

B, T, D, V = 4, 7, 6, 23


class Case:
    """Hidden states, a classifier and targets, with log-probabilities from stored logits."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        self.hidden, self.weight = draw(B, T, D).requires_grad_(), draw(V, D).requires_grad_()
        self.target = torch.randint(0, V, (B, T), generator=generator)
        for row, end in enumerate((7, 5, 3, 6)):
            self.target[row, end:] = -100
        self.target[0, :2] = -100
        self.old, self.ref = -draw(B, T).abs() - 1, -draw(B, T).abs() - 1
        self.advantage = draw(B)

    def stats(self) -> tw.TokenStats:
        return tw.linear_token_stats(self.hidden, self.weight, self.target, want=("log_prob", "entropy"))

    def naive(self) -> list[list[Tensor]]:
        """log p of the tokens that count, for each sequence."""
        log_p = (self.hidden @ self.weight.T).log_softmax(-1)
        return [[log_p[b, t, self.target[b, t]] for t in self.counted(b)] for b in range(B)]

    def counted(self, b: int) -> list[int]:
        return [t for t in range(T) if self.target[b, t] != -100]

    def near(self) -> Tensor:
        """Old log-probabilities close to the present ones: some ratios are clipped and some are not."""
        return self.stats().log_prob.detach() + 0.6 * (self.old + 1.8)


def check(case: Case, ours: Tensor, naive: Tensor) -> None:
    assert_close(ours, naive, 1e-12, "loss")
    inputs = case.hidden, case.weight
    ours_grad, naive_grad = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (ours, naive))
    for got, want in zip(ours_grad, naive_grad, strict=True):
        assert_close(got, want, 1e-10, "gradient")


def log_sigmoid(x: Tensor) -> Tensor:
    return torch.log(1 / (1 + torch.exp(-x)))


def clip_term(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    bounded = 1 - low + 0 * ratio if ratio < 1 - low else 1 + high + 0 * ratio if ratio > 1 + high else ratio
    return -min(ratio * advantage, bounded * advantage)


def test_sft() -> None:
    case = Case(0)
    stats = case.stats()
    every = [value for row in case.naive() for value in row]
    check(case, recipes.sft(stats.log_prob, stats.valid), -sum(every) / len(every))
    assert_close(
        recipes.sft(stats.log_prob, stats.valid), tw.linear_cross_entropy(case.hidden, case.weight, case.target), 1e-12
    )


def test_multi_token_prediction() -> None:
    case = Case(1)
    tokens = torch.randint(0, V, (B, T))
    hidden = [case.hidden, 0.5 * case.hidden, case.hidden.tanh()]
    parts = []
    for ahead, states in enumerate(hidden, start=1):
        log_p = (states @ case.weight.T).log_softmax(-1)
        values = [log_p[b, t, tokens[b, t + ahead]] for b in range(B) for t in range(T - ahead)]
        parts.append(-sum(values) / len(values))
    naive = parts[0] + 0.3 / 2 * (parts[1] + parts[2])
    check(case, recipes.multi_token_prediction(hidden, case.weight, tokens), naive)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_preferences(name: str) -> None:
    """The first two sequences are chosen, the last two rejected."""
    case = Case(2)
    stats, naive = case.stats(), case.naive()
    ref = torch.where(stats.valid, case.ref, 0.0)
    mean = name != "dpo"
    ours = recipes.sequence_mean(stats.log_prob, stats.valid) if mean else recipes.sequence_sum(stats.log_prob)
    ours_ref = recipes.sequence_mean(ref, stats.valid) if mean else recipes.sequence_sum(ref)

    def of(b: int) -> Tensor:
        return sum(naive[b]) / (len(naive[b]) if mean else 1)

    def of_ref(b: int) -> Tensor:
        values = [case.ref[b, t] for t in case.counted(b)]
        return sum(values) / (len(values) if mean else 1)

    pairs = ((0, 2), (1, 3))
    if name in ("dpo", "ipo"):
        margins = [(of(c) - of_ref(c)) - (of(r) - of_ref(r)) for c, r in pairs]
        terms = [-log_sigmoid(0.1 * x) if name == "dpo" else (x - 1 / 0.2) ** 2 for x in margins]
        got = getattr(recipes, name)(ours[:2], ours[2:], ours_ref[:2], ours_ref[2:], beta=0.1)
        want = sum(terms) / 2
    elif name == "simpo":
        want = sum(-log_sigmoid(2.0 * (of(c) - of(r)) - 1.0) for c, r in pairs) / 2
        got = recipes.simpo(ours[:2], ours[2:])
    else:
        nll = -sum(naive[0] + naive[1]) / len(naive[0] + naive[1])
        odds = [torch.log(torch.exp(of(b)) / (1 - torch.exp(of(b)))) for b in range(B)]
        want = nll - 0.1 * sum(log_sigmoid(odds[c] - odds[r]) for c, r in pairs) / 2
        got = recipes.orpo(ours[:2], ours[2:], recipes.sft(stats.log_prob[:2], stats.valid[:2]))
    check(case, got, want)


@pytest.mark.parametrize("kl", [0.4, -0.2])
def test_kto(kl: float) -> None:
    case = Case(3)
    stats, naive = case.stats(), case.naive()
    desirable = torch.tensor([True, False, False, True])
    ref = recipes.sequence_sum(torch.where(stats.valid, case.ref, 0.0))
    terms = []
    for b in range(B):
        above = 0.1 * (sum(naive[b]) - ref[b] - max(kl, 0.0))
        weight, sign = (1.0, 1.0) if desirable[b] else (1.5, -1.0)
        terms.append(weight * (1 - 1 / (1 + torch.exp(-sign * above))))
    ours = recipes.kto(
        recipes.sequence_sum(stats.log_prob),
        ref,
        desirable,
        torch.tensor(kl, dtype=torch.float64),
        undesirable_weight=1.5,
    )
    check(case, ours, sum(terms) / B)


def test_group_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    spread = math.sqrt(4 * 0.25 / 3)
    want = torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.0] * 4])
    assert_close(recipes.group_advantages(rewards), want / (spread + 1e-4), 1e-6)
    assert_close(recipes.group_advantages(rewards, divide=False), want, 1e-6)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "gspo"])
def test_policy_gradients(name: str) -> None:
    case = Case(4)
    stats, naive = case.stats(), case.naive()
    old = torch.where(stats.valid, case.near(), 0.0)
    low, high = {"dapo": (0.2, 0.28), "gspo": (0.05, 0.08)}.get(name, (0.2, 0.2))
    terms: list[list[Tensor]] = []
    ratios = []
    for b in range(B):
        logs = [x - old[b, t] for x, t in zip(naive[b], case.counted(b), strict=True)]
        ratios += [x.exp().item() for x in logs]
        terms.append([clip_term(torch.exp(x), case.advantage[b], low, high) for x in logs])
    assert min(ratios) < 1 - low < 1 + high < max(ratios), "the case must show the clip"
    every = [x for row in terms for x in row]
    if name == "ppo":
        log_p = (case.hidden @ case.weight.T).log_softmax(-1)
        entropies = [-(log_p[b, t].exp() * log_p[b, t]).sum() for b in range(B) for t in case.counted(b)]
        want = sum(every) / len(every) - 0.01 * sum(entropies) / len(entropies)
        advantage = case.advantage[:, None].expand(B, T)
        got = recipes.ppo(stats.log_prob, old, advantage, stats.valid, entropy=stats.entropy)
    elif name == "grpo":
        sequences = []
        for b in range(B):
            refs = [case.ref[b, t] for t in case.counted(b)]
            kls = [torch.exp(r - x) - (r - x) - 1 for r, x in zip(refs, naive[b], strict=True)]
            sequences.append(sum(x + 0.04 * k for x, k in zip(terms[b], kls, strict=True)) / len(kls))
        want = sum(sequences) / B
        ref = torch.where(stats.valid, case.ref, 0.0)
        got = recipes.grpo(stats.log_prob, old, case.advantage, stats.valid, ref_log_prob=ref)
    elif name == "dr_grpo":
        want = sum(every) / (9 * B)
        got = recipes.dr_grpo(stats.log_prob, old, case.advantage, stats.valid, length=9)
    elif name == "dapo":
        want = sum(every) / len(every)
        got = recipes.dapo(stats.log_prob, old, case.advantage, stats.valid)
    else:
        whole = []
        for b in range(B):
            logs = [x - old[b, t] for x, t in zip(naive[b], case.counted(b), strict=True)]
            whole.append(clip_term(torch.exp(sum(logs) / len(logs)), case.advantage[b], low, high))
        want = sum(whole) / B
        got = recipes.gspo(stats.log_prob, old, case.advantage, stats.valid, low=low, high=high)
    check(case, got, want)


def candidates(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Four candidates of each token, its target among them, which are kept, and log-probabilities of all tokens."""
    generator = torch.Generator().manual_seed(9)
    others = (torch.randint(1, V, (B, T, 1), generator=generator) + torch.tensor([0, 5, 9])) % (V - 1) + 1
    target = case.target.clamp(min=0)[..., None]
    pick = torch.cat([target, (target + others) % V], -1)  # distinct
    kept = torch.rand(B, T, 4, generator=generator) > 0.4
    kept[..., 0] = True
    return pick, kept, (case.hidden @ case.weight.T).log_softmax(-1)


def picked_stats(case: Case, pick: Tensor) -> tw.TokenStats:
    return tw.linear_token_stats(case.hidden, case.weight, case.target, want=("log_prob",), pick=pick)


def test_truncated_support() -> None:
    case = Case(7)
    pick, kept, log_p = candidates(case)
    stats = picked_stats(case, pick)
    ours = recipes.truncated(stats.log_prob, stats.picked, kept & stats.valid[..., None])
    total = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in case.counted(b):
            support = pick[b, t][kept[b, t]]
            total = total + (t + 1) * log_p[b, t][support].log_softmax(0)[0]
    check(case, (ours * torch.arange(1, T + 1)).sum(), total)
    assert (ours[~stats.valid] == 0).all()


def test_min_p_keeps_what_the_whole_distribution_keeps() -> None:
    case = Case(8)
    log_p = (case.hidden @ case.weight.T).log_softmax(-1)
    pick = log_p.topk(V // 2).indices
    picked = picked_stats(case, pick).picked
    for share in (0.02, 0.3):
        kept, want = recipes.min_p(picked, share), log_p.exp() >= share * log_p.exp().amax(-1, keepdim=True)
        sure = (case.target != -100) & ~kept.all(-1)
        assert torch.equal(torch.zeros_like(want).scatter(-1, pick, kept)[sure], want[sure])
        assert kept[sure].sum() > sure.sum() > 5


def test_score_centering_leaves_no_gradient_of_a_shared_reward() -> None:
    """The mean over all tokens that the sampler may draw is zero, and so is its gradient, whatever the sampler is."""
    case = Case(9)
    case.target = torch.zeros_like(case.target)
    everything = torch.arange(V).expand(B, T, V)
    q = torch.randn(B, T, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    stats = picked_stats(case, everything)
    mean = sum((q[..., y] * recipes.centred(stats.picked[..., y], stats.picked, q)).sum() for y in range(V))
    grads = torch.autograd.grad(mean, (case.hidden, case.weight), retain_graph=True)
    assert all(grad.abs().max() < 1e-12 for grad in grads)
    log_p = (case.hidden @ case.weight.T).log_softmax(-1)
    naive = (log_p[..., 0] - (q * log_p).sum(-1)).square().sum()
    check(case, recipes.centred(stats.log_prob, stats.picked, q).square().sum(), naive)
