"""A gallery in blocks: it may be larger than the memory of the GPU, or lie in a memory-mapped file.

Axes: m gallery items, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tilewise.ring.blocks import Field, Merge, Tensors, rotate_blocks
from tilewise.ring.exchange import Exchange
from tilewise.ring.schedule import Shards

BLOCK_BYTES = 2**27  # of features; two of these are on the GPU, and two in pinned memory unless the gallery is pinned
Work = Callable[[int, dict[str, Tensor]], Tensors | None]  # (index of the first item, tensors of the block)


def visit_gallery(
    exchange: Exchange,
    shards: Shards,
    payload: Tensors,
    device: torch.device,
    work: Work,
    accumulators: list[Field] | None = None,
    merge: Merge | None = None,
) -> dict[str, Tensor]:
    """Call ``work`` on blocks of the gallery, on ``device``, and return the results of this rank's own items.

    Over a group the gallery of each rank is one block, which moves around the ring (`rotate_blocks`).
    """
    if exchange.world > 1:
        return rotate_blocks(
            exchange,
            shards.cols,
            payload,
            lambda owner, block: work(shards.col_start(owner), block),
            accumulators=accumulators or (),
            merge=merge,
        )
    return visit_own(payload, device, work, shards.col_start(shards.rank))


def visit_own(payload: Tensors, device: torch.device, work: Work, first: int) -> dict[str, Tensor]:
    """Call ``work`` on blocks of this rank's gallery, whose first item has the index ``first``."""
    found: list[Mapping[str, Tensor]] = []
    for part, items in gallery_blocks(payload["gallery"], device):
        block = {name: items if name == "gallery" else value[part] for name, value in payload.items()}
        found.append(work(first + part.start, block) or {})
    if len(found) == 1:
        return dict(found[0])
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def gallery_blocks(gallery: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the items, and their features on ``device``. What is on a GPU already is one block."""
    count = gallery.shape[0]
    rows = max(1, BLOCK_BYTES // max(1, gallery.shape[1] * gallery.element_size()))
    if gallery.device.type != "cpu" or count == 0:
        yield slice(0, count), gallery.to(device)
        return
    parts = [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
    if device.type == "cpu":
        yield from ((part, gallery[part]) for part in parts)
    else:
        yield from _copied(gallery, device, parts)


def _copied(gallery: Tensor, device: torch.device, parts: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of a gallery of the host on a CUDA device. While one is in use, a thread reads and copies the next.

    There are two blocks, used in turn. A block on the device is overwritten when the work on it is done (``used``), and
    one in pinned memory when its copy is done (``sent``). A gallery that is in pinned memory is copied from there.
    """
    shape = (parts[0].stop, gallery.shape[1])
    there = [torch.empty(shape, dtype=gallery.dtype, device=device) for _ in range(2)]
    pinned = [] if gallery.is_pinned() else [torch.empty(shape, dtype=gallery.dtype, pin_memory=True) for _ in range(2)]
    used, sent = [torch.cuda.Event(), torch.cuda.Event()], [torch.cuda.Event(), torch.cuda.Event()]
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)  # the memory of the blocks may still be in use by earlier work

    def send(step: int) -> Tensor:
        which, part = step % 2, parts[step]
        host, block = gallery[part], there[which][: part.stop - part.start]
        if pinned:
            sent[which].synchronize()
            host = pinned[which][: part.stop - part.start].copy_(host)
        side.wait_event(used[which])
        with torch.cuda.stream(side):
            block.copy_(host, non_blocking=True)
            sent[which].record(side)
        return block

    try:
        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(send, 0)
            for step, part in enumerate(parts):
                block = coming.result()
                if step + 1 < len(parts):
                    coming = thread.submit(send, step + 1)
                main.wait_event(sent[step % 2])
                yield part, block
                used[step % 2].record(main)
    finally:
        main.wait_stream(side)  # the blocks are freed on this stream
