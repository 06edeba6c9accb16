"""The nearest items: ours, chunks of scores with `torch.topk`, the product alone (`retrieval_ranks`), and faiss.

    python -m benchmarks.search                    on a CUDA device: the three cases, less than a minute
    python -m benchmarks.search --device cpu       on a CPU, with faiss if it is installed. --share 1: all queries
    python -m benchmarks.search --exact 1000000    only compares indices: so many queries of whole numbers

Prints a line of JSON for each case: the median time of each method in milliseconds, and whether the indices of ours
are those of a stable sort, for some queries with whole numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from benchmarks.measure import time_in_turns

CASES = {  # queries, gallery, features, k
    "cuda": ((131072, 131072, 512, 100), (131072, 131072, 512, 10), (8192, 1048576, 768, 100)),
    "cpu": ((50000, 50000, 64, 10), (5000, 20000, 384, 100)),
}
CHUNK = {"cuda": 2**30, "cpu": 2**24}  # scores that `torch.topk` gets at once
CHECKED = 256  # queries
EXACT_ITEMS = {"cuda": 20000, "cpu": 1000}  # of `differences`: a CPU takes minutes for a million queries


def chunked_topk(queries: Tensor, gallery: Tensor, k: int) -> list[Any]:
    """The usual way: scores of some queries with all items."""
    rows = max(1, CHUNK[queries.device.type] // len(gallery))
    return [(part @ gallery.T).topk(k, dim=1) for part in queries.split(rows)]


def methods(queries: Tensor, gallery: Tensor, k: int) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    found: dict[str, Callable[[], Any]] = {
        "tilewise": lambda: tw.nearest(queries, gallery, k),
        "chunked topk": lambda: chunked_topk(queries, gallery, k),
        "retrieval_ranks": lambda: tw.retrieval_ranks(queries, gallery, torch.zeros_like(queries[:, 0]).long()),
    }
    if queries.device.type == "cpu" and importlib.util.find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        index = faiss.IndexFlatIP(gallery.shape[1])
        index.add(gallery.numpy())
        found["faiss"] = lambda: index.search(queries.numpy(), k)
    return found


def is_exact(queries: Tensor, gallery: Tensor, k: int) -> bool:
    """Whether scores that are whole numbers, with many ties, give the order of a stable sort."""
    queries, gallery = ((8 * x).round() for x in (queries[:CHECKED], gallery))
    want = (queries.double() @ gallery.double().T).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.equal(tw.nearest(queries, gallery, k).indices, want)


def differences(n: int, device: torch.device, m: int, d: int = 8, k: int = 100) -> int:
    """In how many queries of whole numbers, with ties everywhere, the indices are not those of a stable sort."""
    random = torch.Generator().manual_seed(0)
    queries, gallery = (torch.randint(-2, 3, (rows, d), generator=random).float().to(device) for rows in (n, m))
    got, wrong = tw.nearest(queries, gallery, k, progress=True).indices, 0
    rows = max(1, CHUNK[device.type] // (16 * m))  # a sort takes much more memory than its scores
    for part, found in zip(queries.split(rows), got.split(rows), strict=True):
        want = (part @ gallery.T).sort(dim=1, descending=True, stable=True).indices[:, :k]
        wrong += int((found != want).any(1).sum())
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    parser.add_argument("--share", type=float, default=0.1, help="of the queries, on a CPU")
    parser.add_argument("--exact", type=int, default=0, metavar="QUERIES", help="compare indices, and time nothing")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.exact:
        size = {"queries": arguments.exact, "gallery": EXACT_ITEMS[device.type], "features": 8, "k": 100}
        different = differences(arguments.exact, device, EXACT_ITEMS[device.type])
        print(json.dumps({"device": device.type} | size | {"different": different}))
        return
    for n, m, d, k in CASES[device.type]:
        torch.manual_seed(0)
        n = max(1, int(n * arguments.share)) if device.type == "cpu" else n
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        queries, gallery = (F.normalize(torch.randn(rows, d, device=device), dim=1).to(dtype) for rows in (n, m))
        times = time_in_turns(methods(queries, gallery, k), device, repeats=7)
        line = {name: dataclasses.asdict(timing) for name, timing in times.items()}
        print(json.dumps({"case": [n, m, d, k], "exact": is_exact(queries, gallery, k)} | line), flush=True)


if __name__ == "__main__":
    main()
