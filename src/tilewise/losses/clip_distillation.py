"""Distillation of CLIP: the student's similarities of a batch imitate those of a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.losses.clip import NAMES
from tilewise.losses.entry import entry
from tilewise.losses.module import LossModule
from tilewise.losses.sharded import Pairs
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.reduce import reduce_rows
from tilewise.ops.small import Calls
from tilewise.options import TileOptions, check_flag

TEACHER_NAMES = ("teacher_image_features", "teacher_text_features")
SPEC = PairSpec(row_lse=True, guide="kl")
ENTROPY = PairSpec(row_lse=True, row_entropy=True)


@entry(Pairs((*NAMES, *TEACHER_NAMES), scalars=("logit_scale", "teacher_logit_scale")))
def clip_distillation_loss(
    calls: Calls,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    teacher_logit_scale: float | Tensor,
    *,
    teacher_entropy: bool = False,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """KL(teacher || student) of each image over all texts and of each text over all images, averaged.

    Equals, without building the (n, n) logits of either model::

        logits = logit_scale * image_features @ text_features.T
        teacher = teacher_logit_scale * teacher_image_features @ teacher_text_features.T
        def kl(teacher, student): return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
        (kl(teacher, logits) + kl(teacher.T, logits.T)) / 2

    The student's features and scale get exact gradients, the teacher gets none. Add it to `clip_loss` of the same
    features.

    Args:
        image_features, text_features: (n, d) each. They are not normalized; normalize them first.
        logit_scale: multiplies the student's scores; a tensor that requires grad gets its exact gradient.
        teacher_image_features, teacher_text_features: (n, e) each, of the same pairs, in the student's type. The width
            may differ.
        teacher_logit_scale: multiplies the teacher's scores.
        teacher_entropy: add the entropy of the teacher's softmax, a constant. The loss is then the cross entropy of the
            student against the teacher's probabilities, the number that OpenCLIP reports. Costs one product more for
            each direction.
        reduction: "none" returns (n,), the mean of both directions of pair i.
        group: a process group over whose ranks the pairs are sharded; see docs/concepts/ring.md.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, the student's gradients, O(n) statistics, and a workspace.

    >>> x = torch.eye(4)
    >>> clip_distillation_loss(x, x, 1.0, x, x, 1.0).item()
    0.0
    >>> round(clip_distillation_loss(x, x, 1.0, x, x, 5.0).item(), 4)
    0.6444
    """
    _check.check_reduction(reduction)
    check_flag("teacher_entropy", teacher_entropy)
    options, name = _check.check_options(options), _check.group_name(group)
    a, b = _check.check_sides(NAMES, image_features, text_features, paired=True)
    scale = _check.check_scalar("logit_scale", logit_scale, a, rows="multiply the rows of image_features by it")
    teacher = _check.check_sides(TEACHER_NAMES, teacher_image_features, teacher_text_features, paired=True)
    teacher_a, teacher_b = (features.detach() for features in teacher)
    _check.check_same_rows((NAMES[0], TEACHER_NAMES[0]), a, teacher_a)
    _check.check_device_and_type((TEACHER_NAMES[0], NAMES[0]), teacher_a, a, "both tensors of the teacher")
    teacher_scale = _check.check_scalar("teacher_logit_scale", teacher_logit_scale, a).detach().to(stat_dtype(a.dtype))
    scales = {"logit_scale": logit_scale, "teacher_logit_scale": teacher_logit_scale}
    must_match = call_settings(name, reduction=reduction, entropy=teacher_entropy, **scales)
    how: dict[str, Any] = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
    loss_n = torch.zeros((), dtype=stat_dtype(a.dtype), device=a.device)
    for rows, cols, teacher_rows, teacher_cols in ((a, b, teacher_a, teacher_b), (b, a, teacher_b, teacher_a)):
        keys = PairKeys(guide_a=teacher_rows, guide_b=teacher_cols, guide_scale=teacher_scale)
        stats = pair_stats(rows, cols, scale, keys=keys, spec=SPEC, **how)
        loss_n = loss_n + stats.row_kl / 2
        if teacher_entropy:
            constant = pair_stats(teacher_rows, teacher_cols, teacher_scale, spec=ENTROPY, **how)
            loss_n = loss_n + constant.row_entropy / 2
    return reduce_rows(loss_n, reduction, name)


class ClipDistillationLoss(LossModule):
    """`clip_distillation_loss` as a Module that stores the settings."""

    function = staticmethod(clip_distillation_loss)

    def __init__(
        self,
        *,
        teacher_entropy: bool = False,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
