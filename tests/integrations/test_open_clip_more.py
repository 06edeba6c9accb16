"""OpenCLIP's losses with captions and with distillation, against its formulas with all logits."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from tests.oracles import clip_dense
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise.errors import ConfigError, GradientError, GroupError, ShapeError
from tilewise.integrations import open_clip

N, D, E = 37, 12, 20  # E features of the teacher


def unit(rows, width, seed, dtype=torch.float64):
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(values, dim=1).to(dtype)


def student(dtype=torch.float64, rows=N):
    scale = torch.tensor(14.0, dtype=torch.promote_types(dtype, torch.float32))
    return [value.requires_grad_() for value in (unit(rows, D, 0, dtype), unit(rows, D, 1, dtype), scale)]


def teacher(dtype=torch.float64, rows=N):
    return (
        unit(rows, E, 2, dtype),
        unit(rows, E, 3, dtype),
        torch.tensor(20.0, dtype=torch.promote_types(dtype, torch.float32)),
    )


def distill_dense(image, text, scale, their_image, their_text, their_scale):
    ours, theirs = scale * image @ text.T, their_scale * their_image @ their_text.T
    sides = ((theirs, ours), (theirs.T, ours.T))
    return sum(-(y.softmax(1) * x.log_softmax(1)).sum(1).mean() for y, x in sides) / 2


def names(thing):
    return [p.name for p in inspect.signature(thing).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_signatures_are_theirs():
    shared = ["local_loss", "gather_with_grad", "cache_labels", "rank", "world_size", "use_horovod"]
    assert names(open_clip.CoCaLoss) == ["caption_loss_weight", "clip_loss_weight", "pad_id", *shared]
    features = ["image_features", "text_features"]
    assert names(open_clip.CoCaLoss(1, 1).forward) == [*features, "logits", "labels", "logit_scale", "output_dict"]
    assert names(open_clip.DistillClipLoss) == shared
    dist = ["dist_image_features", "dist_text_features", "dist_logit_scale"]
    assert names(open_clip.DistillClipLoss().forward) == [*features, "logit_scale", *dist, "output_dict"]


@pytest.mark.parametrize("clip_weight", [1.0, 0.5, 0.0])
def test_coca(clip_weight):
    image, text, scale = student()
    logits = torch.randn(N, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    labels = torch.randint(0, 9, (N, 5), generator=torch.Generator().manual_seed(5))
    assert (labels == 3).any()
    got = open_clip.CoCaLoss(2.0, clip_weight, pad_id=3)(image, text, logits, labels, scale, output_dict=True)
    assert list(got) == ["contrastive_loss", "caption_loss"]
    want_caption = 2.0 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
    want = clip_weight * clip_dense(image, text, scale)
    assert_close(got["caption_loss"], want_caption, 1e-12)
    (grad,) = torch.autograd.grad(got["caption_loss"], logits)
    assert_close(grad, torch.autograd.grad(want_caption, logits)[0], 1e-12)
    if not clip_weight:
        assert got["contrastive_loss"] == 0
        return
    leaves = [image, text, scale]
    assert_close(got["contrastive_loss"], want, 1e-12)
    ours, theirs = torch.autograd.grad(got["contrastive_loss"], leaves), torch.autograd.grad(want, leaves)
    assert all(relative_error(g, w) < 1e-12 for g, w in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rows, workspace", [(N, 256), (400, 1)])  # 1 MiB is 109 rows
def test_distillation(rows, workspace):
    leaves, constants = student(rows=rows), teacher(rows=rows)
    loss = open_clip.DistillClipLoss(options=tw.TileOptions(workspace_mib=workspace))
    contrastive, distill = loss(*leaves, *constants)
    assert_close(contrastive, clip_dense(*leaves), 1e-12)
    want = distill_dense(*leaves, *constants)
    assert_close(distill, want, 1e-12)
    ours, theirs = torch.autograd.grad(3 * distill, leaves), torch.autograd.grad(3 * want, leaves)
    for got, wanted in zip(ours, theirs, strict=True):
        assert_close(got, wanted, 1e-11)
    both = loss(*leaves, *constants, output_dict=True)
    assert list(both) == ["contrastive_loss", "distill_loss"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bfloat16 products falls back
def test_distillation_in_lower_precision_is_no_worse_than_theirs(dtype):
    exact = [value.detach().double().requires_grad_() for value in student(dtype)]
    truth = distill_dense(*exact, *(value.double() for value in teacher(dtype)))
    truth_grads = torch.autograd.grad(truth, exact)
    errors = []
    for compute in (lambda *given: open_clip.DistillClipLoss()(*given)[1], distill_dense):
        leaves = student(dtype)
        loss = compute(*leaves, *teacher(dtype))
        grads = torch.autograd.grad(loss, leaves)
        pairs = zip((loss, *grads), (truth, *truth_grads), strict=True)
        errors.append([relative_error(got.detach(), want.detach()) for got, want in pairs])
    assert all(ours <= 2 * theirs + 2e-6 for ours, theirs in zip(*errors, strict=True)), errors


class Largest(TorchDispatchMode):
    """The largest number of elements that an operator returned in one tensor."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


def test_distillation_builds_no_matrix():
    leaves, constants = student(torch.float32, rows=1500), teacher(torch.float32, rows=1500)
    loss = open_clip.DistillClipLoss(options=tw.TileOptions(workspace_mib=1))
    with Largest() as largest:
        sum(loss(*leaves, *constants)).backward()
    assert largest.numbers * 4 <= 2**20 < 1500**2


def test_under_autocast():
    leaves, constants = student(torch.float32), teacher(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, distill = open_clip.DistillClipLoss()(*leaves, *constants)
    assert distill.dtype == torch.float32
    assert_close(distill, distill_dense(*leaves, *constants), 1e-2)


def test_a_teacher_of_another_type():
    leaves, constants = student(torch.float32), teacher(torch.float64)
    _, distill = open_clip.DistillClipLoss()(*leaves, *constants)
    assert_close(distill, distill_dense(*(leaf.double() for leaf in leaves), *constants), 1e-6)


def test_refusals():
    image, text, scale = student()
    their_image, their_text, their_scale = teacher()
    with pytest.raises(GroupError, match="world_size=2, but"):
        open_clip.DistillClipLoss(world_size=2)(image, text, scale, their_image, their_text, their_scale)
    with pytest.raises(GradientError, match="teacher requires a gradient"):
        open_clip.DistillClipLoss()(image, text, scale, their_image.requires_grad_(), their_text, their_scale)
    with torch.no_grad():
        open_clip.DistillClipLoss()(image, text, scale, their_image, their_text, their_scale)
    with pytest.raises(ShapeError, match=r"row i of dist_image_features belongs to row i of image_features"):
        open_clip.DistillClipLoss()(image, text, scale, their_image[1:].detach(), their_text[1:], their_scale)
    for loss in (open_clip.ClipLoss(), open_clip.SigLipLoss()):
        with pytest.raises(ConfigError, match="never computed here"):
            loss.get_logits(image, text, scale)
