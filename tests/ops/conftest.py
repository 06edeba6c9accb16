"""What several files of these tests share."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def never_dense(monkeypatch):
    """However many pairs are kept."""
    from tilewise.kernels import filter as plans

    monkeypatch.setattr(plans, "DENSE_SHARE", 2.0)


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the kernels, and what they gave."""
    from tilewise.kernels import direct as kernels

    seen = []

    def counted(pair, weights, needs, spec, options, real=kernels.direct):
        loss, grads = real(pair, weights, needs, spec, options)
        seen.append(SimpleNamespace(pair=pair, needs=needs, grads=grads))
        return loss, grads

    monkeypatch.setattr(kernels, "direct", counted)
    return seen
