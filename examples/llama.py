"""A small Llama in plain PyTorch: the model of two_dimensional.py and context_parallel.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def causal(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Attention of (batch, heads, length, features) to the positions up to its own."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, features: int = 16):
        super().__init__()
        self.features, self.attend = features, causal  # features of a head, and how heads attend
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.features)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = self.attend(rotated(q, position), rotated(k, position), v, position)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, features)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    speed = 10_000 ** -torch.linspace(0, 1, pairs.shape[-1], dtype=x.dtype, device=x.device)
    return torch.view_as_real(torch.exp(1j * position[:, None] * speed) * pairs).flatten(-2)


class Llama(nn.Module):
    """Tokens (batch, length) at the given positions to hidden states. The head is for the loss."""

    def __init__(self, vocabulary: int, width: int = 64, depth: int = 2):
        super().__init__()
        self.table, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device) if position is None else position
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, position)
        return self.norm(x)


def shown_loss(part: Tensor, step: int, steps: int, rank: int, world: int) -> float:
    """The sum over the ranks of their parts of the loss. The first rank prints it in some steps."""
    whole = part.detach().clone()
    if world > 1:
        dist.all_reduce(whole)
    if rank == 0 and step % max(1, steps // 6) == 0:
        print(f"step {step}: loss {whole.item():.6f}, {world} ranks", flush=True)
    return whole.item()
