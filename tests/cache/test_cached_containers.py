"""Inputs and outputs of encoders and losses: nested containers, other numbers of rows, 0-d tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.cache.step_cases import assert_same, both, encode_chunks, gradients, tower
from torch import Tensor, nn

from tilewise.cache import cached_encode, cached_step
from tilewise.cache.chunks import row_ranges, take_rows


class Shared(MutableMapping):
    """A mapping whose shallow copy shares its storage."""

    def __init__(self, **items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Record:
    left: Tensor
    right: Tensor
    note: str = "kept"


class Nested(nn.Module):
    """Accepts x and y in several containers. Returns two representations, a mask and a string."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tower()

    def forward(self, left=None, right=None, flag: bool = True, temperature: Tensor | None = None):
        if isinstance(left, Pair | Record):
            left, right = left.left, left.right
        assert flag
        z = self.body(left + right)
        if temperature is not None:
            z = z / temperature
        return {"z": z, "parts": (z[:, :3].tanh(), left > 0), "note": "row"}


WRAPPINGS = {
    "positional tuple": lambda x, y: (x, y),
    "positional list": lambda x, y: [x, y],
    "keywords": lambda x, y: {"left": x, "right": y, "flag": True, "temperature": torch.tensor(2.0)},
    "ordered dict": lambda x, y: OrderedDict(left=x, right=y),
    "user dict": lambda x, y: UserDict(left=x, right=y),
    "mapping of its own": lambda x, y: Shared(left=x, right=y),
    "read-only mapping": lambda x, y: MappingProxyType({"left": x, "right": y}),
    "named tuple": lambda x, y: Pair(x, y),
    "frozen dataclass": lambda x, y: Record(x, y),
    "argument of its own": lambda x, y: ({"left": x, "right": y}["left"], {"right": y}["right"]),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_nested_inputs_and_outputs(wrap):
    torch.manual_seed(0)
    model = Nested()
    x, y = torch.randn(7, 12), torch.randn(7, 12)

    def loss(rep):
        assert rep["note"] == "row"
        weights = rep["parts"][1].float().mean(1)
        return ((rep["z"] @ rep["z"].T).logsumexp(1) * weights).mean() + rep["parts"][0].square().sum()

    def uncached():
        from tilewise.cache.chunks import call_with

        reps = [call_with(model, take_rows(wrap(x, y), part)) for part in row_ranges(7, 3)]
        return loss(
            {
                "z": torch.cat([r["z"] for r in reps]),
                "parts": tuple(torch.cat([r["parts"][i] for r in reps]) for i in (0, 1)),
                "note": "row",
            }
        )

    both(lambda: cached_step(model, [wrap(x, y)], loss, chunk_size=3), uncached, model)


def test_batch_encoding_and_model_output_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class TextModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(50, 12), tower()

        def forward(self, input_ids, attention_mask):
            hidden = self.body(self.embed(input_ids)) * attention_mask[..., None]
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.mean(1))

    torch.manual_seed(0)
    model, ids = TextModel(), torch.randint(0, 50, (7, 5))
    tokens = transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids > 10).long()})

    def loss(output):
        assert isinstance(output, BaseModelOutputWithPooling)
        z = output.pooler_output
        return (z @ z.T).logsumexp(1).mean() + output["last_hidden_state"].square().mean()

    def uncached():
        outputs = [model(**take_rows(tokens, part)) for part in row_ranges(7, 3)]
        return loss(
            BaseModelOutputWithPooling(
                last_hidden_state=torch.cat([o.last_hidden_state for o in outputs]),
                pooler_output=torch.cat([o.pooler_output for o in outputs]),
            )
        )

    both(lambda: cached_step(model, [tokens], loss, chunk_size=3), uncached, model)


def test_a_chunk_may_return_another_number_of_rows():
    torch.manual_seed(0)
    a = tower()

    def two_views(x):
        return torch.cat([a(x), a(x.flip(1))])

    x = torch.randn(7, 12)

    def loss(z):
        return (z @ z.T).logsumexp(1).mean()

    both(
        lambda: cached_step(two_views, [x], loss, chunk_size=3),
        lambda: loss(encode_chunks(two_views, x, 3)),
        a,
    )


@pytest.mark.parametrize("of_scale", [torch.exp, lambda scale: scale], ids=["computed", "the parameter itself"])
def test_a_temperature_that_the_model_returns_gets_its_gradient_once(of_scale):
    class WithScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.log_scale = tower(dropout=0.0), nn.Parameter(torch.tensor(0.7))

        def forward(self, left, right):
            return self.body(left), self.body(right), of_scale(self.log_scale)

    def loss(rep):
        a, b, scale = rep
        return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)))

    torch.manual_seed(0)
    # In float64, because the gradient of the scalar is a sum that nearly cancels.
    model, x, y = WithScale().double(), torch.randn(7, 12).double(), torch.randn(7, 12).double()
    loss(model(x, y)).backward()
    want = gradients(model)
    cached_step(model, [(x, y)], loss, chunk_size=3)
    assert model.log_scale.is_leaf
    assert_same(gradients(model), want)


def test_other_results_of_the_loss_are_returned_detached():
    a, x = tower(), torch.randn(6, 12)

    def with_metrics(z):
        return z.square().mean(), {"norm": z.norm(), "rows": len(z)}

    loss, metrics = cached_step(a, [x], with_metrics, chunk_size=4)
    assert loss.dim() == 0
    assert not loss.requires_grad
    assert not metrics["norm"].requires_grad
    assert metrics["rows"] == 6
    named = cached_step(a, [x], lambda z: {"loss": z.square().mean(), "z": z}, chunk_size=4)
    assert not named["z"].requires_grad


def test_a_batch_whose_copy_shares_its_storage_is_left_as_it_was():
    batch = Shared(left=torch.randn(7, 4))
    before, layer = batch["left"], nn.Linear(4, 2)
    found = cached_encode(lambda left: layer(left), batch, chunk_size=2)
    assert batch["left"] is before
    assert torch.equal(found, torch.cat([layer(part) for part in before.split(2)]))


def test_an_encoder_may_write_its_output_into_the_chunk():
    x, layer = torch.randn(6, 4, requires_grad=True), nn.Linear(4, 2)

    def encode(features):
        features["embedding"] = layer(features["x"])
        return features["embedding"]

    cached_step(encode, [({"x": x},)], lambda z: z.square().sum(), chunk_size=2)
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(x.grad, want)
