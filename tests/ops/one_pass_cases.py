"""Which losses the one-pass strategy serves, and the options that choose it: for its tests."""

from types import SimpleNamespace

import tilewise as tw
from tilewise.kernels.scalar_loss import gradients_of
from tilewise.kernels.torch_impl.one_pass import TorchOnePass

ONE_PASS = tw.TileOptions(gradients="forward")
TWO_PASS = tw.TileOptions(gradients="backward")
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_ignoring_a_class", "cross_entropy_softcap", "cross_entropy_z_loss", "cross_entropy_shift"),
]
FEW = ["siglip", "info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_z_loss"]


def count_calls(monkeypatch):
    """What was asked of the kernels until the test ends, and what they gave."""
    seen = []

    def counted(self, pair, weights, needs, spec, options, rows, real=TorchOnePass.forward):
        loss, saved = real(self, pair, weights, needs, spec, options, rows)
        seen.append(SimpleNamespace(pair=pair, needs=needs, grads=gradients_of(saved, needs, rows)))
        return loss, saved

    monkeypatch.setattr(TorchOnePass, "forward", counted)
    return seen
