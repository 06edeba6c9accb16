"""PyTorch's own samples for `linear_cross_entropy`, where the installed version has them.

Each sample gives PyTorch's loss and gradients, or a refusal that says what to use instead.
"""

import sys
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close

import tilewise as tw
from tilewise.errors import DtypeError, ShapeError

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this version of torch has no linear_cross_entropy"
)
# What PyTorch accepts and this package refuses: when, the error, and the advice in its message.
REFUSED = {
    "options of PyTorch": (DtypeError, "Use tilewise.TileOptions"),
    "a classifier for each position": (ShapeError, "use torch.nn.functional.linear_cross_entropy"),
    "class probabilities": (DtypeError, "a dense loss such as torch.nn.functional.linear_cross_entropy"),
}


@pytest.fixture(scope="module")
def databases():
    """(operators, modules). Their file imports expecttest, of which only a base class of test cases is used here."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        # The import would forbid every later change of torch.backends flags in this process; other tests change them.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db

    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark  # an error if they are forbidden after all
    return op_db, module_db


def refusal(linear_weight, target, options):
    if options is not None:
        return "options of PyTorch"
    if linear_weight.dim() > 2:
        return "a classifier for each position"
    return "class probabilities" if target.is_floating_point() else None


def compare(input, linear_weight, target, **settings):
    """Whether the sample was computed; otherwise it was refused as it should be."""
    reason = refusal(linear_weight, target, settings.get("options"))
    if reason is not None:
        error, advice = REFUSED[reason]
        with pytest.raises(error, match=advice):
            tw.linear_cross_entropy(input, linear_weight, target, **settings)
        return False
    leaves = [x for x in (input, linear_weight, settings.get("linear_bias")) if x is not None and x.requires_grad]
    if settings.get("weight") is not None:
        settings["weight"] = settings["weight"].detach()
    got = tw.linear_cross_entropy(input, linear_weight, target, **settings)
    want = F.linear_cross_entropy(input, linear_weight, target, **settings)
    assert got.dtype == want.dtype
    if want.isnan().any():  # a mean over no rows
        assert got.isnan().all()
        return True
    assert_close(got, want, 1e-12, "loss")
    grads, want_grads = (torch.autograd.grad(loss.sum(), leaves) for loss in (got, want))
    for ours, theirs in zip(grads, want_grads, strict=True):
        if theirs.norm() < 1e-14:
            assert ours.norm() < 1e-14
        else:
            assert_close(ours, theirs, 1e-12, "gradient")
    return True


def test_samples_of_the_operator(databases):
    operators = [op for op in databases[0] if op.name == "nn.functional.linear_cross_entropy"]
    computed = [
        compare(sample.input, *sample.args, **sample.kwargs)
        for operator in operators
        for sample in operator.sample_inputs("cpu", torch.float64, requires_grad=True)
    ]
    assert sum(computed) >= 30
    assert sum(computed) < len(computed)  # some were refused


def test_samples_of_the_module(databases):
    (info,) = (info for info in databases[1] if info.module_cls.__name__ == "LinearCrossEntropyLoss")
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    computed = []
    for sample in samples:
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
        settings = {
            name: getattr(module, name)
            for name in ("reduction", "ignore_index", "label_smoothing", "options", "weight")
        }
        classifier, bias = module.linear.weight, module.linear.bias
        if module.out_features:  # stored flat
            shape = (module.num_classes, *module.out_features)
            classifier = classifier.view(*shape, -1)
            bias = None if bias is None else bias.view(shape)
        input, target = sample.forward_input.args
        computed.append(compare(input, classifier, target, linear_bias=bias, **settings))
    assert any(computed)
