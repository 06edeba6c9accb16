"""How often each item is in a batch, estimated while the data stream by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import RangeError, ShapeError

FEWEST_BUCKETS, MOST_BUCKETS = 1, 2**31


class StreamingLogQ(nn.Module):
    """Logarithm of the probability with which each item is in a batch, for ``log_q`` of `info_nce`.

    For each bucket b = id modulo ``num_buckets``, it keeps the step at which an item of b was last in a batch, and a
    moving average of the steps between two such batches. In training mode, step t with an item of b does::

        interval[b] += max(momentum, 1 / times[b]) * (t - last[b] - interval[b])
        last[b] = t
        log_q = -log(interval[b])

    where times[b] counts the batches with b, this one included. So the first 1 / momentum intervals have equal weights,
    and later ones follow a frequency that changes. In evaluation mode nothing is updated.

    Args:
        num_buckets: number of buckets. Items that share one look more frequent than they are, so take several times as
            many buckets as items, or the number of items if their ids are 0, 1, 2 and so on.
        momentum: weight of the newest interval, above 0 and at most 1.

    The call takes ids, (n,), integers, and returns log_q, (n,), float32. In evaluation mode an id that was never seen
    counts as if it came in the next step. The estimate is in the ``state_dict``, so a resumed run continues with it.
    Over ranks, call it on every rank with the ids of the whole batch.

    Memory: 16 bytes per bucket. Time: O(n), without a wait for the device.

    >>> log_q = StreamingLogQ(10)
    >>> for step in range(4):
    ...     found = log_q(torch.tensor([3, 7]) if step % 2 else torch.tensor([3]))
    >>> found.exp()
    tensor([1.0000, 0.5000])
    """

    last: Tensor
    interval: Tensor
    times: Tensor
    step: Tensor

    def __init__(self, num_buckets: int, *, momentum: float = 0.05) -> None:
        super().__init__()
        size = _check.check_index("num_buckets", num_buckets, "Pass a number of buckets")
        if not FEWEST_BUCKETS <= size <= MOST_BUCKETS:
            raise RangeError(f"num_buckets is from 1 to 2**31, got {size}. Pass several times the number of items")
        self.num_buckets, self.momentum = size, _check.check_number("momentum", momentum)
        if not 0.0 < self.momentum <= 1.0:
            raise RangeError(f"momentum is above 0 and at most 1, got {self.momentum}. Pass 0.05, say")
        self.register_buffer("last", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("interval", torch.zeros(size))
        self.register_buffer("times", torch.zeros(size, dtype=torch.int32))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.num_buckets}, momentum={self.momentum}"

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """log_q of these ids, which are the next batch in training mode."""
        _check.check_tensor("ids", ids, "a tensor of integers")
        _check.check_integers("ids", ids)
        if ids.dim() != 1:
            raise ShapeError(f"ids has one entry for each item, (n,), got {tuple(ids.shape)}. Flatten it")
        _check.check_device(("ids", "the buckets"), ids, self.last)
        bucket = ids.long().remainder(self.num_buckets)
        now, interval, times = self.step + 1, self.interval[bucket], self.times[bucket]
        gap = (now - self.last[bucket]).to(interval.dtype)
        if not self.training:
            return -torch.where(times == 0, gap, interval).log().float()
        times = times + 1
        interval = torch.lerp(interval, gap, torch.clamp(1.0 / times, min=self.momentum).to(gap.dtype))
        # Items of one bucket write the same numbers, so their order does not matter.
        self.interval[bucket], self.times[bucket], self.last[bucket] = interval, times, now.expand_as(bucket)
        self.step.copy_(now)
        return -interval.log().float()
