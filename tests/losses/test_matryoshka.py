"""A loss of several widths is the sum of its calls with cut inputs: functions, Modules, drop-ins, gradient cache."""

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.losses.loss_cases import Maker
from torch import nn

import tilewise as tw
from tilewise.cache import cached_loss
from tilewise.integrations.pytorch_metric_learning import SupConLoss

MAKE = Maker(torch.float64, n=24, d=16)
A, B, OWN, HEAD = MAKE.unit(24), MAKE.unit(24), MAKE.unit(24, 3), MAKE.random(40, 16)
LABELS = MAKE.integers(5, 24)
LOSSES = {
    "clip": (tw.clip_loss, (A, B, 14.0), {}),
    "own negatives and ids": (tw.InfoNCELoss(), (A, B), {"negative_keys": OWN, "query_ids": LABELS}),
    "drop-in": (SupConLoss(), (A, LABELS), {}),
    "margin": (tw.margin_softmax_loss, (A, HEAD, LABELS), {"logit_scale": 8.0}),
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_sum_over_the_widths(name, normalize):
    loss, args, more = LOSSES[name]
    leaves = [x.clone().requires_grad_() if x.ndim > 1 else x for x in args if isinstance(x, torch.Tensor)]
    args = (*leaves, *args[len(leaves) :])

    def cut(x, width):
        if not isinstance(x, torch.Tensor) or x.ndim == 1:
            return x
        return F.normalize(x[..., :width], dim=-1) if normalize else x[..., :width]

    want = sum(
        weight * loss(*(cut(x, width) for x in args), **{key: cut(x, width) for key, x in more.items()})
        for width, weight in ((16, 1.0), (8, 0.5), (3, 0.25))
    )
    got = tw.Matryoshka(loss, (16, 8, 3), (1.0, 0.5, 0.25), normalize=normalize)(*args, **more)
    assert_close(got, want, 1e-14)
    features = [x for x in leaves if x.requires_grad]
    grads = [torch.autograd.grad(value, features) for value in (got, want)]
    for one, other in zip(*grads, strict=True):
        assert_close(one, other, 1e-13)


def test_with_a_gradient_cache():
    torch.manual_seed(0)
    encoder, x, y = nn.Linear(6, 16).double(), MAKE.random(24, 6), MAKE.random(24, 6)
    loss = tw.Matryoshka(tw.clip_loss, [16, 4])
    want = torch.autograd.grad(loss(encoder(x), encoder(y), 9.0), list(encoder.parameters()))
    cached_loss([encoder, encoder], [x, y], lambda a, b: loss(a, b, 9.0), chunk_size=7).backward()
    for parameter, grad in zip(encoder.parameters(), want, strict=True):
        assert_close(parameter.grad, grad, 1e-12)


def test_parameters_of_the_loss_are_trained_and_saved_and_it_compiles():
    module = tw.Matryoshka(tw.NTXentLoss(temperature=nn.Parameter(torch.tensor(0.2))), (16, 8))
    assert list(module.state_dict()) == ["loss.temperature"]
    z = A.float()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(whole(z), module(z), 1e-6)
