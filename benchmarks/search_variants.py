"""Times variants of the search kernel on a GPU, and shows where the time of the search goes. Not kept.

python -m benchmarks.search_variants           about a minute
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise as tw
from benchmarks.measure import time_in_turns
from benchmarks.search import chunked_topk, differences
from tilewise.kernels.triton_impl import backend
from tilewise.kernels.triton_impl import nearest as main_module
from tilewise.kernels.triton_impl.sizes import Sizes

EARLY = [
    ('        least = tl.load(limit + rows, mask=rows < n, other=float("inf"))\n', ""),
    ("        x = tile_dot(", '        least = tl.load(limit + tile_row * R + tl.arange(0, R), '
     'mask=tile_row * R + tl.arange(0, R) < n, other=float("inf"))\n        x = tile_dot('),
]  # fmt: skip
VARIANTS: dict[str, tuple[list[tuple[str, str]], dict, Sizes | None]] = {
    "as it is": ([], {}, None),
    "not flat": ([(", flatten=hide is None", "")], {}, None),
    "limit early": (EARLY, {}, None),
    "growth 1": ([], {"GROWTH": 1}, None),
    "growth 4": ([], {"GROWTH": 4, "BUFFER": 9}, None),
    "first 128": ([("first, width, held = 0, capacity,", "first, width, held = 0, max(128, 2 * k),")], {}, None),
    "128x256": ([], {}, Sizes(128, 256, 64, 8, 3, 1, 16)),
    "128x256 s4 g8": ([], {}, Sizes(128, 256, 64, 8, 4, 1, 8)),
    "256x128": ([], {}, Sizes(256, 128, 64, 8, 3, 1, 8)),
    "128x128 g8": ([], {}, Sizes(128, 128, 64, 4, 3, 2, 8)),
    "128x128 s2 p3": ([], {}, Sizes(128, 128, 64, 4, 2, 3, 16)),
}


def variant(name: str):
    """A class of the search made from changed source."""
    edits, constants, sizes = VARIANTS[name]
    text = Path(main_module.__file__).read_text()
    for old, new in edits:
        assert old in text, (name, old)
        text = text.replace(old, new)
    for constant, value in constants.items():
        text = re.sub(rf"^{constant} = \d+", f"{constant} = {value}", text, flags=re.M)
    path = Path(tempfile.gettempdir()) / f"variant_{re.sub(r'[^a-z0-9]', '_', name)}.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)

    class Variant(module.FusedSearcher):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.sizes = sizes or self.sizes

    return Variant


def call(name: str, queries, gallery, k: int):
    backend.FusedSearcher = made[name]
    return tw.nearest(queries, gallery, k)


made: dict[str, type] = {}


def data(n: int, m: int, d: int):
    torch.manual_seed(0)
    return [F.normalize(torch.randn(rows, d, device="cuda"), dim=1).bfloat16() for rows in (n, m)]


def profile(run) -> dict[str, float]:
    """Milliseconds of each kernel."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:60]) for e in seen.key_averages()), reverse=True)
    return {f"{name} x{count}": round(ms, 2) for ms, count, name in rows[:8]}


def main() -> None:
    if len(sys.argv) > 1:  # compile one
        made[sys.argv[1]] = variant(sys.argv[1])
        for d in (512, 768):
            small = data(256, 4096, d)
            call(sys.argv[1], *small, 100), call(sys.argv[1], *small, 10)
            if sys.argv[1] == "as it is":
                tw.retrieval_ranks(small[0], small[1], torch.zeros(256, device="cuda").long())
        return
    out = Path(os.environ.get("OUT", ".")) / "search_variants.json"
    compiling = {
        name: subprocess.Popen([sys.executable, "-m", "benchmarks.search_variants", name], stderr=subprocess.PIPE)
        for name in VARIANTS
    }
    for name, process in compiling.items():
        error = process.communicate()[1]
        if process.returncode:
            print(f"{name}: {error.decode()[-1500:]}", flush=True)
        else:
            made[name] = variant(name)
    result: dict = {"different of 20000 (float32)": differences(20000, torch.device("cuda"), 20000)}
    for n, m, d, k in ((131072, 131072, 512, 100), (131072, 131072, 512, 10), (8192, 1048576, 768, 100)):
        queries, gallery = data(n, m, d)
        want = call("as it is", queries, gallery, k)
        few = queries[:64]
        dense = (few.float() @ gallery.float().T).topk(k, dim=1)
        case = result[f"{n} x {m}, k {k}"] = {}
        case["like dense"] = (dense.values - want.scores[:64]).abs().max().item()
        case["same sets"] = (dense.indices.sort(1).values == want.indices[:64].sort(1).values).float().mean().item()
        case["profile"] = profile(lambda: call("as it is", queries, gallery, k))  # noqa: B023
        methods = {name: lambda name=name: call(name, queries, gallery, k) for name in made}  # noqa: B023
        for name in made:
            found = call(name, queries, gallery, k)
            if not (torch.equal(found.indices, want.indices) and torch.equal(found.scores, want.scores)):
                case[f"{name}: differs"] = True
        methods["ranks"] = lambda: tw.retrieval_ranks(queries, gallery, torch.zeros_like(queries[:, 0]).long())  # noqa: B023
        methods["chunked topk"] = lambda: chunked_topk(queries, gallery, k)  # noqa: B023
        times = time_in_turns(methods, queries.device, repeats=5)
        case["ms"] = {name: round(timing.median_ms, 2) for name, timing in times.items()}
        out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
