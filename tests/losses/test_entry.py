"""Known calls: what the key of a call determines is checked once, and nothing else is remembered."""

from types import SimpleNamespace

import pytest
import torch
from tests.losses.loss_cases import CASES, problem, solve, upstream_like

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.kernels.registry import forget_choices
from tilewise.losses import entry
from tilewise.ops.small import Calls

WITH_GUIDE = {name for name in CASES if "guided" in name} | {"info_nce_decoupled_and_corrected"}  # an object in no key


@pytest.fixture
def checked(monkeypatch):
    """Of each call of a public function, in order: whether its arguments had been checked before."""
    found = []

    def made(*args, **kwargs):
        calls = Calls(*args, **kwargs)
        found.append(calls.checked)
        return calls

    monkeypatch.setattr(entry, "Calls", made)
    return found


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_a_known_call_has_the_bits_of_a_first_one(name, reduction, checked):
    """Of other numbers than those of the call that made it known."""
    one, two = (problem(name, torch.float32, n=14, d=6, seed=seed) for seed in (0, 1))
    upstream = upstream_like(two.dense(SimpleNamespace(**two.leaves), reduction=reduction))
    want, want_grads = solve(two.ours, two.leaves, upstream, reduction=reduction)
    forget_choices()
    solve(one.ours, one.leaves, upstream, reduction=reduction)
    loss, grads = solve(two.ours, two.leaves, upstream, reduction=reduction)
    assert checked[-1] == (name not in WITH_GUIDE)
    assert torch.equal(loss, want)
    for leaf, grad in want_grads.items():
        assert torch.equal(grads[leaf], grad), leaf


def test_what_a_key_has(checked):
    """Everything that checks and work depend on, and no value of a tensor or of a temperature."""
    x, y = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    half = x.detach().bfloat16(), y.detach().bfloat16()

    def known(*args, **settings):
        checked.clear()
        tw.info_nce(*args, **settings)
        return checked[-1]

    assert not known(x, y, temperature=0.1)
    assert known(y, x, temperature=0.2)
    assert known(x * 2.0, y, temperature=0.2)
    others = [(x[:5], y[:5]), (x.detach(), y), (x, y.detach()), (x.detach().double(), y.detach().double()), half]
    for features in others:
        assert not known(*features, temperature=0.1)
        assert known(*features, temperature=0.1)
    for more in ({"symmetric": True}, {"options": tw.TileOptions(workspace_mib=7)}, {"query_ids": torch.arange(6)}):
        assert not known(x, y, temperature=0.1, **more)
        assert known(x, y, temperature=0.1, **more)
    with torch.no_grad():
        assert not known(x, y, temperature=0.1)
        assert known(x, y, temperature=0.1)
    with torch.autocast("cpu", torch.bfloat16):  # it converts features, so they are checked each time
        for _ in range(2):
            assert not known(x, y, temperature=0.1)
    assert known(x, y, temperature=0.1)


def test_a_known_call_refuses_what_a_first_one_does():
    """A value that is equal to a good one but of another class, a wrong number, and a call that has failed before."""
    x, y, target = torch.randn(6, 4), torch.randn(5, 4), torch.arange(6) % 5
    for _ in range(2):
        tw.info_nce(x, x, temperature=1.0, in_batch=True)
        tw.linear_cross_entropy(x, y, target, shift=0)
        tw.clip_loss(x, x, torch.tensor(2.0))
    wrong = [
        (ConfigError, "in_batch is True or False, got 1", lambda: tw.info_nce(x, x, temperature=1.0, in_batch=1)),
        (RangeError, "temperature must be positive", lambda: tw.info_nce(x, x, temperature=-1.0, in_batch=True)),
        (RangeError, "class indices in", lambda: tw.linear_cross_entropy(x, y, target + 3, shift=0)),
        (RangeError, "logit_scale must be finite", lambda: tw.clip_loss(x, x, torch.tensor(torch.nan))),
        (DtypeError, "want is a sequence", lambda: tw.linear_token_stats(x, y, target, want=7)),
        (ConfigError, "want is a sequence", lambda: tw.linear_token_stats(x, y, target, want=(["entropy"],))),
        (ShapeError, "belongs to row", lambda: tw.clip_loss(x, y, torch.tensor(2.0))),
    ]
    for error, words, call in wrong * 2:
        with pytest.raises(error, match=words):
            call()


def test_a_known_call_follows_the_targets(checked):
    """Whether one of them is ignored is no part of the key, but selects other work."""
    x, y = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    target = torch.tensor([0, 1, -100, 3, 4, -100])
    for labels in (target, target.clamp(min=0)) * 2:
        loss = tw.linear_cross_entropy(x, y, labels)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ y.T, labels))
    assert checked == [False, True, True, True]


def test_other_limits_and_backends_forget_known_calls(checked, set_limits):
    x = torch.randn(6, 4)
    for _ in range(2):
        tw.clip_loss(x, x, 1.0)
    set_limits(small_cpu=0)
    tw.clip_loss(x, x, 1.0)
    forget_choices()
    tw.clip_loss(x, x, 1.0)
    assert checked == [False, True, False, False]


def test_a_function_does_not_remember_keys_without_end(monkeypatch, checked):
    monkeypatch.setattr(entry, "MOST_KEYS", 3)
    for n in (2, 3, 4, 5, 2, 5):
        tw.clip_loss(torch.ones(n, 2), torch.ones(n, 2), 1.0)
    assert checked == [False, False, False, False, False, True]
