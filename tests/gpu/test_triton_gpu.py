"""The Triton backend on a CUDA device against the dense oracle: cases, layouts, sizes, and every claim about memory."""

import logging

import pytest
import torch
from tests.gpu import checks
from tests.gpu.checks import Place, peak_bytes
from tests.kernels.pair_cases import CASES
from tests.losses.loss_cases import CASES as LOSSES

import tilewise as tw
from tilewise.kernels import registry
from tilewise.tools.tune_check import TYPES, why_not_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU, MIB = Place(), 2**20
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SERVED = sorted(name for name in CASES if name != "siglip_many")
FEW = ["clip_by_position", "cross_entropy_smoothed_and_capped", "nt_xent", "siglip", "supcon_foreign_block"]


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", SERVED)
def test_bfloat16(name, seed):
    """Small with all the workspace, larger with several macro-tiles; the kernels are the same."""
    checks.check_case(GPU, name, torch.bfloat16, 1, seed)
    checks.check_case(GPU, name, torch.bfloat16, 9, seed + 1, workspace_mib=1)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", [*FEW, "rows_of_unlike_size"])
def test_float32(name, seed):
    checks.check_case(GPU, name, torch.float32, 1, seed)
    checks.check_case(GPU, name, torch.float32, 9, seed + 1, workspace_mib=1)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", FEW)
def test_float16(name, seed):
    checks.check_case(GPU, name, torch.float16, 1, seed)
    checks.check_case(GPU, name, torch.float16, 9, seed + 1, workspace_mib=1)


@pytest.mark.parametrize("name", ["clip", "cross_entropy", "nt_xent", "supcon", "siglip"])
def test_the_same_twice(name, seed):
    checks.check_same_twice(GPU, name, torch.bfloat16, 40, seed)


@pytest.mark.parametrize("name", ["clip", "cross_entropy_smoothed_and_capped", "supcon", "siglip"])
def test_unaligned_inputs(name, seed):
    checks.check_layout(GPU, name, torch.bfloat16, seed)


def test_unaligned_inputs_in_float32(seed):
    checks.check_layout(GPU, "ids_excluded", torch.float32, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_frozen_sides(dtype):
    checks.check_frozen(GPU, dtype, n=3000, d=96)


# Accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, precision, lowest", [
    (torch.bfloat16, "torch", -1e-4),
    (torch.float32, "highest", -1e-4),
    (torch.float32, "high", -1e-3),
], ids=["bfloat16", "float32", "tf32"])  # fmt: skip
def test_losses_of_aligned_pairs_are_not_negative(dtype, precision, lowest):
    checks.check_never_negative(GPU, dtype, lowest, n=4096, d=512, precision=precision)


def test_tf32_when_asked_for(seed):
    checks.check_tf32(GPU, n=2000, d=256, seed=seed)


@pytest.mark.parametrize("name", LOSSES)
def test_tf32_is_as_accurate_as_the_dense_path(name, seed):
    """In tiles. The strategy for small batches multiplies with cuBLAS, as the dense path does."""
    checks.check_tf32_errors(GPU, name, n=2000, d=128, seed=seed, gradients="backward")


@pytest.mark.parametrize("name", ["info_nce", "cross_entropy", "siglip"])
def test_tf32_in_one_pass_is_as_accurate_as_the_dense_path(name, seed):
    checks.check_tf32_errors(GPU, name, n=3000, d=128, seed=seed, gradients="forward")


def test_tf32_of_ranks_and_nearest_is_as_accurate_as_the_dense_path(seed):
    checks.check_search_in_tf32(GPU, n=2000, m=20_000, d=256, seed=seed)


# Size ------------------------------------------------------------------------------------------------------------


def test_a_million_rows():
    checks.check_large(GPU, 2**20, 2**20, 64, torch.bfloat16, samples=64)


@pytest.mark.parametrize("n, m", [(1_100_000, 300), (300, 1_100_000)])
def test_more_than_two_to_the_31_numbers_on_one_side(n, m):
    checks.check_large(GPU, n, m, 2048, torch.bfloat16, samples=64)


@pytest.mark.parametrize("d", [1, 8192])
def test_narrowest_and_widest(d):
    checks.check_large(GPU, 700, 900, d, torch.bfloat16, samples=2000)


# Memory ----------------------------------------------------------------------------------------------------------


def clip_step(n: int, d: int, **settings):
    a, b, scale = (x.requires_grad_() for x in checks.aligned(GPU, n, d, torch.bfloat16, 1.0))

    def step():
        torch.autograd.grad(tw.clip_loss(a, b, scale, options=GPU.options(**settings)), (a, b, scale))

    return step


def test_clip_at_65536_takes_512_mib():
    assert peak_bytes(clip_step(65_536, 512)) <= 512 * MIB


@pytest.mark.parametrize("settings", [{}, {"workspace_mib": 8}], ids=["default", "8 MiB"])
def test_memory_grows_with_the_rows(settings):
    small, large = (peak_bytes(clip_step(n, 256, **settings)) for n in (20_000, 80_000))
    assert large <= 4.5 * small, f"{small / MIB:.0f} and {large / MIB:.0f} MiB"


def test_siglip_at_65536_takes_640_mib():
    a, b, scale = (x.requires_grad_() for x in checks.aligned(GPU, 65_536, 768, torch.bfloat16, 1.0))
    bias = torch.tensor(-10.0, device="cuda", requires_grad=True)

    def step():
        torch.autograd.grad(tw.siglip_loss(a, b, scale, bias, options=GPU.options()), (a, b, scale, bias))

    assert peak_bytes(step) <= 640 * MIB


def head(n, vocabulary, d):
    hidden = torch.randn(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    classifier = torch.randn(vocabulary, d, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    return hidden, classifier, torch.randint(vocabulary, (n,), device="cuda")


def test_cross_entropy_takes_its_gradients_and_the_workspace():
    """Saved columns take 184 MiB of it, from forward on, and float32 row gradients 72. The peak is backward's.

    Beside the workspace, the correction of positives has partial sums: 2 x 128 x 2304 numbers in float32, 2.3 MiB.
    """
    n, vocabulary, d = 8192, 256_000, 2304
    hidden, classifier, target = head(n, vocabulary, d)
    options = GPU.options(workspace_mib=256)

    def step():
        loss = tw.linear_cross_entropy(hidden, classifier, target, options=options)
        torch.autograd.grad(loss, (hidden, classifier))

    assert peak_bytes(step) <= 2 * d * (n + vocabulary) + 260 * MIB
    before = torch.cuda.memory_allocated()
    loss = tw.linear_cross_entropy(hidden, classifier, target, options=options)
    assert torch.cuda.memory_allocated() - before <= 2 * d * vocabulary + 186 * MIB, "between the passes"
    del loss
    assert torch.cuda.memory_allocated() - before <= MIB


@pytest.mark.parametrize("n, vocabulary, d", [(8192, 256_000, 2304), (16_376, 128_256, 2048), (40_000, 128_256, 1024)])
def test_the_default_takes_no_more_than_explain_says(n, vocabulary, d):
    leaves = head(n, vocabulary, d)
    (found,) = tw.explain(tw.linear_cross_entropy, *leaves).calls
    assert "the default for these sizes" in found.workspace_limit
    peak = peak_bytes(lambda: torch.autograd.grad(tw.linear_cross_entropy(*leaves), leaves[:2]))
    assert peak <= found.peak_bytes + 24 * (n + vocabulary) * 8 + 12 * MIB
    logits = 2 * n * vocabulary
    assert peak <= 0.7 * (logits + found.gradient_bytes) + found.accumulator_bytes


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_full_card_gives_the_same_bits(compiled, monkeypatch):
    """Other tests share the card, so it is not filled: torch gets no more than 6 GiB, and reports them as free."""
    leaves = head(16_376, 128_256, 1024)
    loss = torch.compile(tw.linear_cross_entropy, fullgraph=True) if compiled else tw.linear_cross_entropy
    empty = torch.autograd.grad(loss(*leaves), leaves[:2])
    torch.cuda.empty_cache()
    room, total = 6 * 2**30, torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (room, total))
        full = torch.autograd.grad(loss(*leaves), leaves[:2])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(one, two) for one, two in zip(empty, full, strict=True))


# Which backend ---------------------------------------------------------------------------------------------------


def test_auto_takes_triton_and_says_why_not(caplog):
    with caplog.at_level(logging.DEBUG, logger="tilewise"):
        tw.nt_xent(torch.eye(64, device="cuda", dtype=torch.bfloat16))
    assert "backend triton chosen" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="tilewise"):
        tw.nt_xent(torch.eye(64, device="cuda", dtype=torch.float64))
    assert "backend triton not chosen: it multiplies float16, bfloat16 and float32" in caplog.text
    assert "backend torch chosen" in caplog.text


@pytest.mark.parametrize("name, width", [("bfloat16", 1024), ("float32", 512)])
def test_the_check_of_tuned_sizes_accepts_those_for_other_cards(name, width):
    device, item = torch.device("cuda", torch.cuda.current_device()), TYPES[name][0].itemsize
    assert why_not_all(device, item, registry.size_table().TABLE["other", item], (width,)) is None
