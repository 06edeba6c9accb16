"""Which losses form their gradients in forward, and the options that say when: for the tests of it."""

from types import SimpleNamespace

import tilewise as tw
from tilewise.kernels.torch_impl import one_pass as kernels

EARLY = tw.TileOptions(gradients="forward")
LATE = tw.TileOptions(gradients="backward")
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_ignoring_a_class", "cross_entropy_softcap", "cross_entropy_z_loss", "cross_entropy_shift"),
]
FEW = ["siglip", "info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_z_loss"]


def count_calls(monkeypatch):
    """What was asked of the kernels until the test ends, and what they gave."""
    seen = []

    def counted(pair, weights, needs, spec, options, real=kernels.direct):
        loss, grads = real(pair, weights, needs, spec, options)
        seen.append(SimpleNamespace(pair=pair, needs=needs, grads=grads))
        return loss, grads

    monkeypatch.setattr(kernels, "direct", counted)
    return seen
