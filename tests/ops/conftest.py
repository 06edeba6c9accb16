"""What several files of these tests share."""

import pytest


@pytest.fixture
def never_dense(monkeypatch):
    """However many pairs are kept."""
    from tilewise.kernels import filter as plans

    monkeypatch.setattr(plans, "DENSE_SHARE", 2.0)
