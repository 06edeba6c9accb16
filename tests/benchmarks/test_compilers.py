"""The comparison of compilers: what it writes, what it prints, and which products it finds in a kernel's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import compilers


def report(triton: str, share: float, digest: str) -> dict:
    rows = [{"case": "clip", "status": "ok", "ms": 27.5, "share_of_rate": share}]
    bits = [{"case": "clip_loss, TF32", "digests": [digest], "norms": [float(len(digest))]}]
    return {"triton": triton, "assembler": "12.8", "results": rows, "bits": bits}


def test_the_comparison_shows_ratios_and_bits() -> None:
    first, other = report("3.6.0", 0.8, "ab"), report("3.9.0", 0.9, "abc")
    shown = compilers.compared(first, other)
    assert "| clip | 27.50 ms, 0.800 R | 27.50 ms, 0.900 R | 0.889 |" in shown
    assert "| clip_loss, TF32 | differ; norms by 5.0e-01 |" in shown
    assert "| clip_loss, TF32 | the same |" in compilers.compared(first, first)


def test_products_with_an_operand_in_registers() -> None:
    shared = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2}, %rd1, %rd2, p, 1, 1, 0, 0;"
    registers = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2}, %rd2, p, 1, 1, 0;"
    assert not compilers.IN_REGISTERS.search(shared)
    assert compilers.IN_REGISTERS.search(f"{shared}\n{registers}")


def test_kernels_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, operand in (("pair_kernel", "{%r1}"), ("forward_kernel", "%rd1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.ptx").write_text(f"wgmma.mma_async.x {{%f1}}, {operand}, %rd2;")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compilers.kernels_in_registers() == ["pair_kernel"]


def test_calls_on_integers_are_repeatable_and_not_trivial() -> None:
    first, again = (compilers.digests(torch.device("cpu"), quick=True) for _ in range(2))
    assert first == again
    assert len(first) == 7
    assert all(norm > 0 for row in first for norm in row["norms"])


def test_the_command_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "measured", lambda *arguments: [])
    monkeypatch.setattr(compilers, "digests", lambda *arguments: [])
    compilers.main(["--quick", "--commit", "abc", "--out", str(tmp_path / "a.json")])
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["commit"], written["bits"], written["results"]) == ("abc", [], [])
