"""Memory claims are tests: peak resident memory above the inputs, gradients included, in a fresh process each."""

import functools

import pytest
from tests.processes import peak_bytes

MIB = 2**20


@functools.cache
def peak(name, n, d, dtype="float32", workspace_mib=None):
    arguments = {"name": name, "n": n, "d": d, "dtype": dtype, "workspace_mib": workspace_mib}
    return peak_bytes("tests.memory_steps:measured", arguments)


def test_at_most_an_eighth_of_dense():
    assert peak("clip", 8192, 64) <= peak("dense_clip", 8192, 64) / 8


@pytest.mark.parametrize("name", ["clip", "supcon"])
def test_memory_grows_with_the_batch_not_with_its_square(name):
    """With a workspace of 2 MiB nothing hides behind it. Scores at 8,192 rows would take 256 MiB."""
    small, large = (peak(name, n, 64, workspace_mib=2) for n in (2048, 8192))
    assert large <= 4.5 * small
    assert large <= 16 * MIB


def test_a_margin_softmax_stores_no_cosines():
    """Those of 8,192 rows and classes would take 256 MiB; both sides, their normalized copies and gradients take 12."""
    assert peak("margin", 8192, 64, workspace_mib=2) <= 24 * MIB


@pytest.mark.parametrize(
    "name, dtype, workspace_mib",
    [
        ("clip", "float32", 4),
        ("clip", "float32", 32),
        ("clip_hot", "bfloat16", 4),
        ("siglip", "float32", 4),
        ("info_nce_ids", "float32", 4),
        ("supcon", "float32", 4),
        ("cross_entropy", "bfloat16", 8),
        ("jsd", "float32", 8),
    ],
)
def test_scratch_stays_within_the_workspace(name, dtype, workspace_mib):
    """Peak = gradients (float32 while they grow) + vectors + at most the workspace.

    2 MiB more are allowed: resident memory also has the buffers of the BLAS, which differ between versions of torch.
    """
    n, d = 4096, 128
    sides = 1 if name == "supcon" else 2
    gradients, vectors = sides * n * d * 4, 24 * n * 8
    assert peak(name, n, d, dtype, workspace_mib) <= workspace_mib * MIB + gradients + vectors + 2 * MIB
