"""Reinforcement learning (GRPO) of a small language model on the CPU, with exact log-probabilities.

    python examples/grpo.py                 two cores: a few minutes, nothing is downloaded

The model writes 12 numbers below 512. The reward is a rule: the share of numbers that are larger than the one before.
Log-probabilities of the samples come from `linear_token_stats`, so that before the first update the importance ratio
exp(new - old) is 1 to six digits. The last lines show the ratio of a head that rounds its logits to bfloat16.

Axes: b answers, t tokens.
"""

import argparse

import torch
from post_training import group_advantages, grpo
from torch import nn

import tilewise as tw

LENGTH, VOCABULARY, WIDTH, PROMPTS, ANSWERS = 12, 512, 128, 16, 16


class Model(nn.Module):
    """A recurrent language model: token embeddings, one GRU, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def log_prob(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """log p of each token given those before it: (b, t - 1)."""
        hidden, _ = self.rnn(self.embed(tokens_bt))
        stats = tw.linear_token_stats(hidden, self.head.weight, tokens_bt, shift=1, want=("log_prob",))
        return stats.log_prob

    @torch.no_grad()
    def sample(self, prompt_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers, with the prompt in front, and the log-probability of each of their tokens as it was drawn."""
        tokens, log_probs, state = [prompt_b], [], None
        for _ in range(LENGTH):
            hidden, state = self.rnn(self.embed(tokens[-1][:, None]), state)
            drawn = torch.multinomial(self.head(hidden[:, 0]).softmax(-1), 1)[:, 0]
            stats = tw.linear_token_stats(hidden[:, 0], self.head.weight, drawn, want=("log_prob",))
            tokens.append(drawn)
            log_probs.append(stats.log_prob)
        return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, old = model.sample(torch.randint(0, VOCABULARY // 4, (PROMPTS,)).repeat_interleave(ANSWERS))
        reward = (tokens[:, 1:] > tokens[:, :-1]).float().mean(1)
        advantage = group_advantages(reward.view(PROMPTS, ANSWERS)).flatten()
        for update in range(2):
            new = model.log_prob(tokens)
            if step == update == 0:
                first = (new - old).detach().exp()
            loss = grpo(new, old, advantage, torch.ones_like(new, dtype=torch.bool))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4}  reward {reward.mean():.3f}", flush=True)
    print(f"first importance ratio: {first.min():.6f} to {first.max():.6f}")
    hidden, _ = model.rnn(model.embed(tokens))
    logits = (hidden[:, :-1] @ model.head.weight.T).detach()
    rounded = logits.bfloat16().float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    ratio = (rounded - model.log_prob(tokens).detach()).exp()
    print(f"with logits rounded to bfloat16 it would be {ratio.min():.6f} to {ratio.max():.6f}")


if __name__ == "__main__":
    main()
