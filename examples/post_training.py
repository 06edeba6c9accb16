"""Losses of post-training, each a few lines on the log-probabilities of `tw.linear_token_stats`. Copy what you need.

    stats = tw.linear_token_stats(hidden, head.weight, tokens, shift=1, want=("log_prob", "entropy"))
    loss = grpo(stats.log_prob, old_log_prob, advantages, stats.valid)

Every function takes log-probabilities of tokens, (b, t), which are 0 where ``valid``, (b, t), is False. The logits
are never stored, whatever the loss. Each function is compared with a naive implementation in tests/examples.

Axes: b sequences, t tokens of a sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw


def sequence_sum(log_prob: Tensor) -> Tensor:
    """log p of each whole sequence: (b,). Ignored tokens are 0."""
    return log_prob.sum(-1)


def sequence_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the tokens that count, for each sequence: (b,); 0 for a sequence without such tokens."""
    return torch.where(valid, values, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)


def token_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over all tokens that count: 0-d; 0 if there are none."""
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


# Supervised


def sft(log_prob: Tensor, valid: Tensor) -> Tensor:
    """Supervised fine-tuning: L = -mean log p. The same number as `tw.linear_cross_entropy`."""
    return -token_mean(log_prob, valid)


def multi_token_prediction(hidden: list[Tensor], weight: Tensor, tokens: Tensor, *, factor: float = 0.3) -> Tensor:
    """Next-token loss of ``hidden[0]``, plus the losses of heads that look further ahead, through one classifier.

        L = L_1 + factor / D * (L_2 + ... + L_{D+1}),       L_k = cross-entropy of hidden[k - 1] against tokens k later

    Args:
        hidden: D + 1 tensors (b, t, d): hidden states for the next token, for the one after it, and so on.
        weight: (V, d), shared by all.
        tokens: (b, t).
        factor: the weight of the further heads.
    """
    losses = [tw.linear_cross_entropy(states, weight, tokens, shift=k) for k, states in enumerate(hidden, start=1)]
    return losses[0] + factor * sum(losses[1:]) / max(len(losses) - 1, 1)


# Preferences: a chosen and a rejected answer to the same prompt


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Direct preference optimization, on `sequence_sum` of each answer: (b,) each.

    L = -mean log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))
    """
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Identity preference optimization, on `sequence_mean` of each answer: (b,) each.

    L = mean (((chosen - ref_chosen) - (rejected - ref_rejected)) - 1 / (2 beta))^2
    """
    return (((chosen - ref_chosen) - (rejected - ref_rejected)) - 1 / (2 * beta)).square().mean()


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """Simple preference optimization, on `sequence_mean` of each answer; no reference model.

    L = -mean log sigmoid(beta * (chosen - rejected) - margin)
    """
    return -F.logsigmoid(beta * (chosen - rejected) - margin).mean()


def orpo(chosen: Tensor, rejected: Tensor, nll: Tensor, *, beta: float = 0.1) -> Tensor:
    """Odds-ratio preference optimization, on `sequence_mean` of each answer; no reference model.

    L = nll - beta * mean log sigmoid(odds(chosen) - odds(rejected)),       odds(l) = l - log(1 - exp(l))

    Args:
        chosen, rejected: (b,), mean log-probabilities.
        nll: `sft` of the chosen answers.
        beta: the weight of the preference.
    """

    def log_odds(mean_log_prob: Tensor) -> Tensor:
        return mean_log_prob - torch.log(-torch.expm1(mean_log_prob))

    return nll - beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected)).mean()


def kto(
    answer: Tensor,
    ref_answer: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimization: single answers, each desirable or not. On `sequence_sum`.

        r = answer - ref_answer
        L = mean of  w_d (1 - sigmoid(beta (r - kl)))  or  w_u (1 - sigmoid(beta (kl - r)))

    Args:
        answer, ref_answer: (b,), log-probabilities of the answers.
        desirable: (b,) bool.
        kl: 0-d, the mean of ``answer - ref_answer`` over prompts paired with answers to other prompts, at least 0
            and without gradient.
        beta: the strength of the reference.
        desirable_weight, undesirable_weight: weights of the two kinds.
    """
    above = beta * (answer - ref_answer - kl.detach().clamp(min=0))
    gain = torch.where(desirable, torch.sigmoid(above), torch.sigmoid(-above))
    return (torch.where(desirable, desirable_weight, undesirable_weight) * (1 - gain)).mean()


# Policy gradients


def group_advantages(rewards: Tensor, *, divide: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Advantages within groups of answers to the same prompt: (prompts, answers) in, the same shape out.

    A = (r - mean r) / (std r + epsilon); Dr. GRPO does not divide.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (rewards.std(-1, keepdim=True) + epsilon) if divide else centred


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A)."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def kl_to_reference(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) for each token, never negative: exp(r) - r - 1, r = ref - log_prob."""
    difference = ref_log_prob - log_prob
    return torch.expm1(difference) - difference


def ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor,
    *,
    entropy: Tensor | None = None,
    clip: float = 0.2,
    entropy_weight: float = 0.01,
) -> Tensor:
    """Proximal policy optimization, with an advantage for each token (b, t) and an optional entropy bonus."""
    loss = token_mean(clipped((log_prob - old_log_prob).exp(), advantage, clip, clip), valid)
    return loss if entropy is None else loss - entropy_weight * token_mean(entropy, valid)


def grpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor,
    *,
    ref_log_prob: Tensor | None = None,
    clip: float = 0.2,
    kl_weight: float = 0.04,
) -> Tensor:
    """Group relative policy optimization: the mean of each sequence, then the mean of the sequences.

    ``advantage`` (b,) comes from `group_advantages`. With ``ref_log_prob`` the divergence from a reference is added.
    """
    tokens = clipped((log_prob - old_log_prob).exp(), advantage[:, None], clip, clip)
    if ref_log_prob is not None:
        tokens = tokens + kl_weight * kl_to_reference(log_prob, ref_log_prob)
    return sequence_mean(tokens, valid).mean()


def dr_grpo(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, valid: Tensor, *, length: int, clip: float = 0.2
) -> Tensor:
    """Dr. GRPO: the sum of the tokens divided by a constant, so that long answers are not favoured.

    ``advantage`` (b,) is from ``group_advantages(divide=False)``. ``length`` is the largest length of an answer.
    """
    tokens = clipped((log_prob - old_log_prob).exp(), advantage[:, None], clip, clip)
    return torch.where(valid, tokens, 0.0).sum() / (length * log_prob.shape[0])


def dapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.28,
) -> Tensor:
    """DAPO: the mean over all tokens of the batch, and a wider clip upwards."""
    return token_mean(clipped((log_prob - old_log_prob).exp(), advantage[:, None], low, high), valid)


def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Tensor:
    """Group sequence policy optimization: one ratio for each sequence, exp(mean of log_prob - old_log_prob)."""
    return clipped(sequence_mean(log_prob - old_log_prob, valid).exp(), advantage, low, high).mean()


# What the sampler kept: K candidate tokens of each token, with `pick=` of `tw.linear_token_stats`
#
#     stats = tw.linear_token_stats(hidden, head.weight, tokens, shift=1, pick=candidates.clamp(min=0))
#     log_prob = truncated(stats.log_prob, stats.picked, candidates[:, 1:] >= 0)


def truncated(log_prob: Tensor, picked: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities under a sampler that drew from the kept candidates only (top-k, top-p or min-p): (b, t).

        log p(y) - log sum of p over the kept candidates

    Args:
        log_prob: (b, t), of the tokens, over the whole vocabulary.
        picked: (b, t, K), likewise of the candidates. Among the kept ones is the token itself.
        kept: (b, t, K) bool. A token without any is returned as it is.
    """
    some = kept.any(-1, keepdim=True)
    support = torch.where(kept, picked, torch.where(some, -torch.inf, 0.0))
    return log_prob - torch.where(some[..., 0], support.logsumexp(-1), 0.0)


def min_p(picked: Tensor, share: float) -> Tensor:
    """Which candidates a sampler with this min-p keeps: those with at least ``share`` of the largest probability.

    The candidates include the likeliest token. All that it keeps are among them if it does not keep all of them.
    """
    return picked >= picked.amax(-1, keepdim=True) + math.log(share)


def centred(log_prob: Tensor, picked: Tensor, sampler_prob: Tensor) -> Tensor:
    """Score centering: log p(y) - sum_k q_k log p_k, in place of log p(y) in a policy gradient.

    Its gradient has mean zero under the sampler, so a reward that all tokens share moves the policy nowhere.
    ``sampler_prob``, (b, t, K), is the sampler's probability q of each candidate, 0 for padding, without gradient. If
    the candidates are not all tokens, what they leave out is not centred.
    """
    return log_prob - (sampler_prob * picked).sum(-1)
