"""Bad inputs of the losses and their options: the call, the error type, and what its message must contain."""

import copy
import math
import warnings
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from tests import oracles
from tests.oracles import nt_xent_dense, siglip_dense, supcon_dense
from tests.partitioned import partition
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    GroupError,
    RangeError,
    ShapeError,
)
from tilewise.losses.negatives import NO_ID

A = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
B = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), dim=1)
Y = torch.arange(6)
AWAY = torch.empty(6, 4, device="meta")
WEIGHT = torch.ones(6, requires_grad=True)
OPTIONS = tw.TileOptions
LAYER = torch.nn.Linear(4, 6)
ZERO3 = partition(copy.deepcopy(LAYER))
FREED = dict.__getitem__(ZERO3._parameters, "weight")
LONG, EACH = (8 * A).long(), torch.arange(1.0, 7.0)
B9 = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
CUBE = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(3))  # a classifier for each of three positions
PAIRED, TARGETS, PICKS = Y % 3, torch.stack([Y, Y.flip(0), Y], 1), torch.stack([Y, 5 - Y], 1)
COMPLEX = torch.complex(A, B)
LOGITS = A @ B.T
RARE = Y % 5  # no sample of the last class
COUNTS, WORDS = torch.bincount(RARE, minlength=6), [f"class {i}" for i in PAIRED.tolist()]
FAKE = FakeTensorMode().from_tensor(torch.ones(6, 4))
JAGGED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)], layout=torch.jagged)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested tensors with a stride are a prototype of PyTorch
    NESTED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)])


def cross_entropy(hidden=A, classifier=B, target=Y, **settings):
    return tw.linear_cross_entropy(hidden, classifier, target, **settings)


def soft(target, weight, smoothing=0.0):
    return oracles.soft_info_nce_dense(A.double(), B.double(), target, weight, 0.07, smoothing)


def clip(a=A, b=B, scale=1.0):
    return oracles.clip_dense(a.double(), b.double(), scale)


def ce(hidden=A, classifier=B, target=Y, **settings):
    return oracles.linear_cross_entropy_dense(hidden.double(), classifier.double(), target, **settings)


def lse(bias=0.0, softcap=None):
    logits = A.double() @ B.double().T + bias
    return (softcap * torch.tanh(logits / softcap) if softcap else logits).logsumexp(1)


def infonce(negatives=None, **settings):
    negatives = None if negatives is None else negatives.double()
    return oracles.info_nce_dense(A.double(), B.double(), negatives, **settings)


def picked(ids):
    return (A.double() @ B.double().T).log_softmax(1).gather(1, ids)


def sparse(ids=Y[:, None], log_probs=None, **settings):
    log_probs = -torch.ones(ids.shape) if log_probs is None else log_probs
    return oracles.sparse_distillation_dense(A.double(), B.double(), ids, log_probs.double(), **settings)


def complex_nt_xent():
    z = COMPLEX.to(torch.complex128)
    logits = (z @ z.conj().T).real / 0.5
    return torch.nn.functional.cross_entropy(logits.fill_diagonal_(-torch.inf), (Y + 3) % 6)


def numbered(names):
    """As the message says."""
    number = {name: i for i, name in enumerate(sorted(set(names)))}
    return torch.tensor([number[name] for name in names])


def under_autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def entropy():
    log_p = (A.double() @ B.double().T).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def mean_of_picked(stats):
    return stats.picked[stats.valid].mean(0)


def second_derivative(detach):
    """The gradient of a norm of a gradient, or that norm where the gradient is detached."""
    z = A.clone().requires_grad_()
    (grad,) = torch.autograd.grad(tw.clip_loss(z, B, 1.0), z, create_graph=True)
    if detach:
        return grad.detach().square().sum()
    return grad.square().sum().backward()


def gradient_norm():
    z = A.double().requires_grad_()
    return torch.autograd.grad(oracles.clip_dense(z, B.double(), 1.0), z)[0].square().sum()


def with_options(**options):
    """A loss with the options that the message names, and the loss."""
    return tw.linear_cross_entropy(A, B, Y, options=OPTIONS(**options)), ce()


def jagged(values):
    return torch.nested.nested_tensor([values], layout=torch.jagged)


def inside_its_mode(call):
    """The shape and the type of a fake result are all that can be compared."""
    with FAKE.fake_mode:
        loss = call()
    assert type(loss).__name__ == "FakeTensor"
    return torch.zeros(loss.shape, dtype=loss.dtype)


def on_mps(call):
    """The call with fake features on an Apple GPU; no such device is needed."""
    with FakeTensorMode():
        features = torch.empty(6, 4, device="mps")
        return call(features, features)


# name: (call, error, (what is expected, what was passed, what to do), the result if this is done and that of an oracle)
BAD = {
    # features
    "a list": (
        lambda: tw.clip_loss(A.tolist(), B, 1.0),
        DtypeError,
        ("image_features is a tensor", "list", "as_tensor"),
        lambda: (tw.clip_loss(torch.as_tensor(A.tolist()), B, 1.0), clip()),
    ),
    "integers": (
        lambda: tw.clip_loss(LONG, B, 1.0),
        DtypeError,
        ("image_features holds floating", "int64", r"\.float\(\)"),
        lambda: (tw.clip_loss(LONG.float(), B, 1.0), clip(LONG)),
    ),
    "complex": (
        lambda: tw.nt_xent(COMPLEX),
        DtypeError,
        ("features holds floating", "complex64", r"torch\.view_as_real\(features\)\.flatten\(-2\)"),
        lambda: (tw.nt_xent(torch.view_as_real(COMPLEX).flatten(-2)), complex_nt_xent()),
    ),
    "one dimension": (
        lambda: tw.clip_loss(A[0], B, 1.0),
        ShapeError,
        (r"image_features must be \(rows, features\)", r"\(4,\)", r"Reshape.* \.unsqueeze\(0\)"),
        lambda: (tw.clip_loss(A[0].unsqueeze(0), B[:1], 1.0), clip(A[:1], B[:1])),
    ),
    "sparse": (
        lambda: tw.clip_loss(A.to_sparse(), B, 1.0),
        DtypeError,
        ("image_features is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
        lambda: (tw.clip_loss(A.to_sparse().to_dense(), B, 1.0), clip()),
    ),
    "a device without float64": (
        lambda: on_mps(lambda a, b: tw.clip_loss(a, b, 1.0)),
        DeviceError,
        ("image_features must be on a device that has float64", "mps", r"\.cpu\(\)"),
    ),
    "ranks on a device without float64": (
        lambda: on_mps(tw.retrieval_ranks),
        DeviceError,
        ("queries must be on a device that has float64", "mps", r"\.cpu\(\)"),
    ),
    "a parameter that is partitioned": (
        lambda: cross_entropy(classifier=FREED),
        ConfigError,
        ("linear_weight is a whole parameter", "ZeRO-3", r"self\.head\.weight"),
        lambda: (cross_entropy(classifier=ZERO3.weight), ce(classifier=LAYER.weight)),
    ),
    "a layer for its weight": (
        lambda: cross_entropy(classifier=LAYER),
        DtypeError,
        ("linear_weight is a tensor", "Linear", r"\.weight"),
        lambda: (cross_entropy(classifier=LAYER.weight), ce(classifier=LAYER.weight)),
    ),
    "a module for its output": (
        lambda: cross_entropy(torch.nn.ReLU()),
        DtypeError,
        ("input is a tensor", "ReLU", "Pass its output"),
        lambda: (cross_entropy(torch.nn.ReLU()(A)), ce(A.relu())),
    ),
    "classifier transposed": (
        lambda: cross_entropy(classifier=B9.T.contiguous()),
        ShapeError,
        ("input and linear_weight", r"\(6, 4\) and \(4, 9\)", r"linear_weight\.T"),
        lambda: (cross_entropy(classifier=B9.T.contiguous().T), ce(classifier=B9)),
    ),
    "temperature in third place": (
        lambda: tw.info_nce(A, B, 0.1),
        ShapeError,
        ("negative_keys must be", "float", "temperature="),
        lambda: (tw.info_nce(A, B, temperature=0.1), infonce(temperature=0.1)),
    ),
    "three dimensions": (
        lambda: tw.nt_xent(A[None]),
        ShapeError,
        (r"features must be \(rows, features\)", r"\(1, 6, 4\)", r"flatten"),
        lambda: (tw.nt_xent(A[None].flatten(0, -2)), nt_xent_dense(A.double())),
    ),
    "other width": (
        lambda: tw.clip_loss(A, B[:, :3], 1.0),
        ShapeError,
        ("same number of features", r"\(6, 4\) and \(6, 3\)", "projection head"),
    ),
    "other rows": (
        lambda: tw.clip_loss(A, B[:5], 1.0),
        ShapeError,
        ("same number of rows", r"\(6, 4\) and \(5, 4\)", "filter"),
    ),
    "other rows, siglip": (
        lambda: tw.siglip_loss(A, B[:5], 1.0, 0.0),
        ShapeError,
        ("same number of rows", r"\(5, 4\)", "filter"),
    ),
    "other rows, info_nce": (lambda: tw.info_nce(A, B[:5]), ShapeError, ("same number of rows", r"\(5, 4\)", "filter")),
    "other type": (
        lambda: tw.clip_loss(A, B.double(), 1.0),
        DtypeError,
        ("same type", "float32 and torch.float64", r"Convert one of them with \.to\(\)$"),
        lambda: (tw.clip_loss(A.to(torch.float64), B.double(), 1.0), clip()),
    ),
    "other device": (lambda: tw.clip_loss(A, AWAY, 1.0), DeviceError, ("one device", "cpu and meta", "Move")),
    "odd views": (
        lambda: tw.nt_xent(A[:5]),
        ShapeError,
        ("even number of rows", r"\(5, 4\)", "torch.cat"),
        lambda: (tw.nt_xent(torch.cat([A[:5], B[:5]])), nt_xent_dense(torch.cat([A[:5], B[:5]]).double())),
    ),
    # numbers
    "scale of two": (
        lambda: tw.clip_loss(A, B, torch.ones(2)),
        ShapeError,
        ("logit_scale is one number", r"\(2,\)", "features"),
        lambda: (tw.clip_loss(A * EACH[:, None], B, 1.0), clip(A * EACH[:, None])),
    ),
    "scale of integers": (
        lambda: tw.clip_loss(A, B, torch.tensor(3)),
        DtypeError,
        ("logit_scale is a floating", "int64", r"\.float\(\)"),
        lambda: (tw.clip_loss(A, B, torch.tensor(3).float()), clip(scale=3.0)),
    ),
    "scale as text": (
        lambda: tw.clip_loss(A, B, "14"),
        DtypeError,
        ("logit_scale is a number", "str", r"float\(\)"),
        lambda: (tw.clip_loss(A, B, float("14")), clip(scale=14.0)),
    ),
    "scale as bool": (
        lambda: tw.clip_loss(A, B, True),
        DtypeError,
        ("logit_scale is a number", "bool", r"float\(\)"),
        lambda: (tw.clip_loss(A, B, float(True)), clip()),
    ),
    "scale nan": (lambda: tw.clip_loss(A, B, math.nan), RangeError, ("logit_scale must be finite", "nan", "Check")),
    "scale tensor inf": (
        lambda: tw.clip_loss(A, B, torch.tensor(math.inf)),
        RangeError,
        ("logit_scale must be finite", "inf", "gradient"),
    ),
    "scale elsewhere": (
        lambda: tw.clip_loss(A, B, torch.empty((), device="meta")),
        DeviceError,
        ("logit_scale", "meta and cpu", "Move"),
    ),
    "no bias": (
        lambda: tw.siglip_loss(A, B, 1.0, None),
        DtypeError,
        ("logit_bias is a number", "NoneType", "Pass a number"),
        lambda: (tw.siglip_loss(A, B, 1.0, -2.0), siglip_dense(A.double(), B.double(), 1.0, -2.0)),
    ),
    "temperature 0": (
        lambda: tw.info_nce(A, B, temperature=0.0),
        RangeError,
        ("temperature must be positive", "0.0", "logarithm"),
        lambda: (tw.info_nce(A, B, temperature=math.exp(0.0)), infonce(temperature=1.0)),
    ),
    "margin below 0": (
        lambda: tw.margin_softmax_loss(A, B, Y, m2=-0.5),
        RangeError,
        ("m1 is above 0, m2 and m3 are at least 0", "1.0, -0.5 and 0.0", "1, 0 and 0"),
        lambda: (tw.margin_softmax_loss(A, B, Y, m1=1, m2=0, m3=0), ce(A, F.normalize(B), scale=64.0)),
    ),
    "no classes sampled": (
        lambda: tw.margin_softmax_loss(A, B, Y, sample_rate=0),
        RangeError,
        ("sample_rate is above 0 and at most 1", "got 0", "Pass 1 for all"),
        lambda: (
            tw.margin_softmax_loss(A, B, Y, m2=0.0, sample_rate=1.0),
            ce(A, F.normalize(B), scale=64.0),
        ),
    ),
    "no classes": (
        lambda: tw.MarginSoftmaxLoss(4, 0),
        RangeError,
        ("num_classes is at least 1", "got 0", "Pass one for each"),
        lambda: (torch.tensor(tw.MarginSoftmaxLoss(4, 6).weight.shape), torch.tensor([6, 4])),
    ),
    "labels without a queue": (
        lambda: tw.supcon_loss(A, PAIRED, queue_labels=Y),
        ConfigError,
        ("queue and queue_labels belong together", "got queue_labels alone", "Pass queue too"),
        lambda: (
            tw.supcon_loss(A, PAIRED, queue=B, queue_labels=PAIRED),
            supcon_dense(A.double(), PAIRED, queue=B.double(), queue_labels=PAIRED),
        ),
    ),
    "scales for each row": (
        lambda: tw.clip_loss(A, B, EACH),
        ShapeError,
        ("logit_scale is one number", r"\(6,\)", "multiply the rows of image_features by it"),
        lambda: (tw.clip_loss(A * EACH[:, None], B, 1.0), clip(A * EACH[:, None])),
    ),
    "a soft target that is no key": (
        lambda: tw.soft_info_nce(A, B, PICKS + 1),
        RangeError,
        ("indices of keys from 0 to 5", "got 6", "Are they indices into all keys"),
    ),
    "weights of other targets": (
        lambda: tw.soft_info_nce(A, B, PICKS, torch.ones(6, 3)),
        ShapeError,
        (r"one number for each target, \(6, 2\)", r"got \(6, 3\)", "Pass K of both"),
        lambda: (tw.soft_info_nce(A, B, PICKS, torch.ones(6, 2) / 2), soft(PICKS, torch.ones(6, 2) / 2)),
    ),
    "too much label smoothing": (
        lambda: tw.soft_info_nce(A, B, label_smoothing=1.5),
        RangeError,
        ("label_smoothing is from 0 to 1", "got 1.5", "It is the share of the uniform labels"),
    ),
    "label smoothing without the query itself": (
        lambda: tw.soft_info_nce(A, A, PICKS, label_smoothing=0.1, exclude_self=True),
        ConfigError,
        ("gives every key a weight", "got 0.1 with exclude_self=True", "Pass one of the two"),
        lambda: (tw.soft_info_nce(A, B, PICKS, label_smoothing=0.1), soft(PICKS, torch.full((6, 2), 0.5), 0.1)),
    ),
    "temperatures of other queries": (
        lambda: tw.info_nce(A, B, temperature=torch.ones(4)),
        ShapeError,
        (r"a number, or \(6,\), one for each query", r"got \(4,\)", "Did a filter drop"),
    ),
    "a temperature of a query below zero": (
        lambda: tw.info_nce(A, B, temperature=EACH - 1),
        RangeError,
        ("temperature is positive and finite", "got values from 0.0 to 5.0", "It divides the scores"),
    ),
    "log_q of the keys alone": (
        lambda: tw.info_nce(A, B, B9, log_q=-EACH),
        ShapeError,
        (r"each shared negative, so its shape is \(15,\)", r"\(6,\)", "Pass 0 for a negative"),
        lambda: (
            tw.info_nce(A, B, B9, log_q=torch.cat([-EACH, torch.zeros(9)])),
            infonce(negatives=B9.double(), log_q=torch.cat([-EACH, torch.zeros(9)])),
        ),
    ),
    "log_q with a gradient": (
        lambda: tw.info_nce(A, B, log_q=WEIGHT),
        GradientError,
        ("log_q is a constant", "requires grad", r"log_q\.detach\(\)"),
        lambda: (tw.info_nce(A, B, log_q=WEIGHT.detach()), infonce(log_q=WEIGHT.detach())),
    ),
    "log_q of an item that was never drawn": (
        lambda: tw.info_nce(A, B, log_q=COUNTS.log() - COUNTS.sum().log()),
        RangeError,
        ("log_q holds finite logarithms", "-inf", "at least once"),
        lambda: (
            tw.info_nce(A, B, log_q=COUNTS.clamp(min=1).log() - COUNTS.sum().log()),
            infonce(log_q=COUNTS.clamp(min=1).log() - COUNTS.sum().log()),
        ),
    ),
    "statistics as a number": (
        lambda: tw.pair_stats(A, B, want=3),
        DtypeError,
        ("want is a sequence of names", "got 3", "Pass a tuple of names"),
        lambda: (tw.pair_stats(A, B, want=("logsumexp",)).logsumexp, lse()),
    ),
    "labels of the rows alone": (
        lambda: tw.pair_stats(A, B, row_labels=Y),
        ConfigError,
        ("row_labels and col_labels belong together", "got row_labels alone", "Pass col_labels too"),
        lambda: (
            tw.pair_stats(A, B, row_labels=Y, col_labels=Y).positive_sum,
            (A.double() * B.double()).sum(1),
        ),
    ),
    "one pick for each row": (
        lambda: tw.pair_stats(A, B, pick=Y),
        ShapeError,
        (r"K columns for each row, \(6, K\)", r"\(6,\)", r"use \[:, None\]"),
        lambda: (tw.pair_stats(A, B, pick=Y[:, None]).picked[:, 0], (A.double() * B.double()).sum(1)),
    ),
    "shift of another size": (
        lambda: tw.pair_stats(A, B, shift=EACH[:5]),
        ShapeError,
        (r"shift has one number for each row, \(6,\)", r"\(5,\)", "Did a filter"),
    ),
    "shift with a gradient": (
        lambda: tw.pair_stats(A, B, shift=WEIGHT),
        GradientError,
        ("shift is a constant", "requires grad", r"shift\.detach\(\)"),
        lambda: (tw.pair_stats(A, B, shift=WEIGHT.detach()).logsumexp, lse() - 1),
    ),
    "statistics that exclude each other": (
        lambda: tw.pair_stats(A, B, want=("col_logsumexp", "entropy")),
        ConfigError,
        ("one call computes col_logsumexp or entropy", "got both", "Call pair_stats for each"),
        lambda: (
            tw.pair_stats(A, B, want=["entropy"]).logsumexp + tw.pair_stats(B, A, want="col_logsumexp").col_logsumexp,
            2 * lse(),
        ),
    ),
    "no picks to exclude": (
        lambda: tw.pair_stats(A, B, exclude_picked=True),
        ConfigError,
        ("leaves out the columns in pick", "got None", r"Pass pick, \(n, K\)"),
        lambda: (
            tw.pair_stats(A, B, exclude_picked=True, pick=Y[:, None]).logsumexp,
            LOGITS.double().fill_diagonal_(-torch.inf).logsumexp(1),
        ),
    ),
    "a loss that is none": (
        lambda: tw.Matryoshka(3.0, (4, 2)),
        DtypeError,
        ("loss is a function or a Module", "float", r"Pass tw\.clip_loss"),
        lambda: (tw.Matryoshka(tw.clip_loss, (4,))(A, B, 1.0), clip()),
    ),
    "widths without a number": (
        lambda: tw.Matryoshka(tw.clip_loss, ()),
        DtypeError,
        ("widths is a sequence of numbers", r"got \(\)", "Pass a tuple"),
        lambda: (tw.Matryoshka(tw.clip_loss, (4, 4))(A, B, 1.0), 2 * clip()),
    ),
    "a width of 0": (
        lambda: tw.Matryoshka(tw.clip_loss, (4, 0)),
        RangeError,
        ("widths are at least 1", "got 0", "Pass numbers of features"),
        lambda: (tw.Matryoshka(tw.clip_loss, (4,))(A, B, 1.0), clip()),
    ),
    "a weight too few": (
        lambda: tw.Matryoshka(tw.clip_loss, (4, 2), (1.0,)),
        ConfigError,
        ("one number for each of 2 widths", "got 1", "Pass None for 1 each"),
        lambda: (tw.Matryoshka(tw.clip_loss, (4, 4), None)(A, B, 1.0), 2 * clip()),
    ),
    "a width that features do not have": (
        lambda: tw.Matryoshka(tw.clip_loss, (8, 4))(A, B, 1.0),
        ShapeError,
        ("features that are at least 8 wide", r"got \(6, 4\)", "Pass smaller widths"),
        lambda: (tw.Matryoshka(tw.clip_loss, (4,))(A, B, 1.0), clip()),
    ),
    "no buckets": (
        lambda: tw.StreamingLogQ(0),
        RangeError,
        ("num_buckets is from 1", "got 0", "Pass several times the number of items"),
        lambda: (tw.StreamingLogQ(12)(Y), torch.zeros(len(Y))),
    ),
    "a momentum of 0": (
        lambda: tw.StreamingLogQ(6, momentum=0.0),
        RangeError,
        ("momentum is above 0", "got 0.0", "Pass 0.05"),
        lambda: (tw.StreamingLogQ(6, momentum=0.05)(Y), torch.zeros(len(Y))),
    ),
    "ids in two dimensions": (
        lambda: tw.StreamingLogQ(6)(Y[:, None]),
        ShapeError,
        ("ids has one entry for each item", r"got \(6, 1\)", "Flatten it"),
        lambda: (tw.StreamingLogQ(6)(Y[:, None].flatten()), torch.zeros(len(Y))),
    ),
    "temperature -1": (
        lambda: tw.nt_xent(A, temperature=-1),
        RangeError,
        ("temperature must be positive", "-1", "exp"),
        lambda: (tw.nt_xent(A, temperature=math.exp(-1)), nt_xent_dense(A.double(), math.exp(-1))),
    ),
    "temperature nan": (
        lambda: tw.nt_xent(A, temperature=math.nan),
        RangeError,
        ("temperature must be finite", "nan", "Check"),
    ),
    "temperature inf": (
        lambda: tw.nt_xent(A, temperature=math.inf),
        RangeError,
        ("temperature must be finite", "inf", "Check"),
    ),
    "learned temperature": (
        lambda: tw.supcon_loss(A, Y, temperature=torch.tensor(-0.1)),
        RangeError,
        ("temperature must be positive", "-0.1", r"\.exp\(\)"),
        lambda: (
            tw.supcon_loss(A, PAIRED, temperature=torch.tensor(-0.1).exp()),
            supcon_dense(A.double(), PAIRED, math.exp(-0.1)),
        ),
    ),
    "smoothing 1.5": (
        lambda: cross_entropy(label_smoothing=1.5),
        RangeError,
        (r"label_smoothing is in \[0, 1\]", "1.5", "fraction"),
    ),
    "smoothing nan": (
        lambda: cross_entropy(label_smoothing=math.nan),
        RangeError,
        ("label_smoothing must be finite", "nan", "Check"),
    ),
    "smoothing text": (
        lambda: cross_entropy(label_smoothing="0.1"),
        DtypeError,
        ("label_smoothing is a number", "str", r"float\(\)"),
        lambda: (cross_entropy(label_smoothing=float("0.1")), ce(label_smoothing=0.1)),
    ),
    "z_loss nan": (lambda: cross_entropy(z_loss=math.nan), RangeError, ("z_loss must be finite", "nan", "Check")),
    "z_loss None": (
        lambda: cross_entropy(z_loss=None),
        DtypeError,
        ("z_loss is a number", "NoneType", "Pass a number"),
        lambda: (cross_entropy(z_loss=0.0), ce()),
    ),
    "softcap -1": (
        lambda: cross_entropy(softcap=-1),
        RangeError,
        ("softcap is a positive number", "-1", "None or 0"),
        lambda: (cross_entropy(softcap=None), ce()),
    ),
    "softcap 1e39": (lambda: cross_entropy(softcap=1e39), RangeError, ("softcap must fit float32", r"1e\+39", "Check")),
    "softcap text": (
        lambda: tw.linear_logsumexp(A, B, softcap="30"),
        DtypeError,
        ("softcap is a number", "str", r"float\(\)"),
        lambda: (tw.linear_logsumexp(A, B, softcap=float("30")), lse(softcap=30.0)),
    ),
    "shift -1": (
        lambda: cross_entropy(A[None], B, Y[None], shift=-1),
        RangeError,
        ("shift is a whole number", "-1", "shift=1"),
        lambda: (cross_entropy(A[None], B, Y[None], shift=1), ce(A[None], B, Y[None], shift=1)),
    ),
    "shift half": (
        lambda: cross_entropy(A[None], B, Y[None], shift=0.5),
        RangeError,
        ("shift is a whole number", "0.5", "shift=1"),
        lambda: (cross_entropy(A[None], B, Y[None], shift=1), ce(A[None], B, Y[None], shift=1)),
    ),
    "shift None": (
        lambda: cross_entropy(A[None], B, Y[None], shift=None),
        RangeError,
        ("shift is a whole number", "None", "shift=1"),
        lambda: (cross_entropy(A[None], B, Y[None], shift=1), ce(A[None], B, Y[None], shift=1)),
    ),
    "ignore_index half": (
        lambda: cross_entropy(ignore_index=1.5),
        DtypeError,
        ("ignore_index is a whole number", "float 1.5", "marks padding"),
        lambda: (cross_entropy(ignore_index=1), ce(ignore_index=1)),
    ),
    "ignore_index bool": (
        lambda: tw.linear_token_stats(A, B, Y, ignore_index=True),
        DtypeError,
        ("ignore_index is a whole number", "bool True", "marks padding"),
        lambda: (tw.linear_token_stats(A, B, Y, ignore_index=1).mean("log_prob"), -ce(ignore_index=1)),
    ),
    "pick half": (
        lambda: tw.linear_token_stats(A, B, Y, pick=PICKS.float()),
        DtypeError,
        ("pick holds integers", "float32", r"\.long\(\), if its values are whole"),
        lambda: (tw.linear_token_stats(A, B, Y, pick=PICKS.float().long()).picked, picked(PICKS)),
    ),
    "pick without K": (
        lambda: tw.linear_token_stats(A, B, Y, pick=Y),
        ShapeError,
        (r"pick has K class ids for each hidden state, \(6, K\)", r"\(6,\)", "axes are those of input"),
        lambda: (tw.linear_token_stats(A, B, Y, pick=Y[:, None]).picked, picked(Y[:, None])),
    ),
    "pick out of range": (
        lambda: tw.linear_token_stats(A, B, Y, pick=Y[:, None] + 1),
        RangeError,
        (r"class ids in \[0, 6\)", "6", "Pass ids"),
        lambda: (tw.linear_token_stats(A, B, Y, pick=PICKS).picked, picked(PICKS)),
    ),
    "temperature of each token learned": (
        lambda: tw.linear_token_stats(A, B, Y, temperature=WEIGHT),
        GradientError,
        ("temperature is a constant", "requires grad", "detach"),
        lambda: (tw.linear_token_stats(A, B, Y, temperature=WEIGHT.detach()).mean("log_prob"), -ce()),
    ),
    "temperature of each token zero": (
        lambda: tw.linear_token_stats(A, B, Y, temperature=torch.zeros(6)),
        RangeError,
        ("temperature is positive and finite", "0.0", "divides the logits"),
    ),
    "teacher of probabilities": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None], torch.ones(6, 1)),
        RangeError,
        ("natural logarithms of probabilities", "2.718", "log_softmax"),
        lambda: (
            tw.linear_sparse_distillation_loss(A, B, PICKS, LOGITS.log_softmax(1)[:, :2]),
            sparse(PICKS, LOGITS.log_softmax(1)[:, :2]),
        ),
    ),
    "teacher learned": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None], -WEIGHT[:, None]),
        GradientError,
        ("teacher_log_probs is a constant", "requires grad", "detach"),
        lambda: (tw.linear_sparse_distillation_loss(A, B, Y[:, None], -WEIGHT[:, None].detach()), sparse()),
    ),
    "a teacher's id twice": (
        lambda: tw.linear_sparse_distillation_loss(A, B, torch.ones(6, 2).long(), -torch.ones(6, 2)),
        RangeError,
        ("teacher_ids has each id of a token once", "1 twice", "negative ids"),
        lambda: (
            tw.linear_sparse_distillation_loss(A, B, torch.tensor([[1, -1]] * 6), -torch.ones(6, 2)),
            sparse(torch.ones(6, 1).long()),
        ),
    ),
    "a teacher without ids": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None][:, :0], -torch.ones(6, 0)),
        ShapeError,
        ("teacher_ids has at least one class id for each token", r"\(6, 0\)", "last axis"),
        lambda: (tw.linear_sparse_distillation_loss(A, B, Y[:, None], -torch.ones(6, 1)), sparse()),
    ),
    "one axis of ids": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y, -torch.ones(6)),
        ShapeError,
        ("teacher_ids has K class ids for each hidden state", r"\(6,\)", "axes are those of input"),
        lambda: (tw.linear_sparse_distillation_loss(A, B, Y[:, None], -torch.ones(6, 1)), sparse()),
    ),
    "teacher of other classes": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None] + 3, -torch.ones(6, 1)),
        RangeError,
        (r"class ids in \[0, 6\)", "6", "negative id is padding"),
    ),
    "divergence": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None], -torch.ones(6, 1), divergence="kl"),
        ConfigError,
        ("no divergence", "'kl'", "choose one of forward"),
        lambda: (
            tw.linear_sparse_distillation_loss(A, B, Y[:, None], -torch.ones(6, 1), divergence="reverse"),
            sparse(divergence="reverse"),
        ),
    ),
    "ignore_index too large": (
        lambda: cross_entropy(ignore_index=2**70),
        RangeError,
        ("ignore_index must fit 64 bits", "71 bits", "marks padding"),
        lambda: (cross_entropy(ignore_index=1), ce(ignore_index=1)),
    ),
    "a scale of many digits": (
        lambda: tw.clip_loss(A, B, 10**5000),
        RangeError,
        ("logit_scale must fit float32", "16610 bits", "Check"),
    ),
    "ignore_index tensor": (
        lambda: cross_entropy(ignore_index=Y[0]),
        DtypeError,
        ("ignore_index is a whole number", "Tensor", "marks padding"),
        lambda: (cross_entropy(ignore_index=Y[0].item()), ce(ignore_index=0)),
    ),
    "scale 1e39": (
        lambda: tw.clip_loss(A, B, 1e39),
        RangeError,
        ("logit_scale must fit float32", r"1e\+39", "Check"),
    ),
    "scale 1e39 in float64": (
        lambda: tw.clip_loss(A, B, torch.tensor(1e39, dtype=torch.float64)),
        RangeError,
        ("logit_scale must fit float32", r"1e\+39", "Check"),
    ),
    "scale 10^400": (
        lambda: tw.clip_loss(A, B, 10**400),
        RangeError,
        ("logit_scale must fit float32", "1329 bits", "Check"),
    ),
    "temperature 1e-40": (
        lambda: tw.info_nce(A, B, temperature=1e-40),
        RangeError,
        ("1 / temperature must fit float32", "1e-40", "exp"),
        lambda: (tw.info_nce(A, B, temperature=math.exp(1e-40)), infonce(temperature=1.0)),
    ),
    "learned temperature 1e-40": (
        lambda: tw.nt_xent(A, temperature=torch.tensor(1e-40)),
        RangeError,
        ("1 / temperature must fit float32", "temperature of 9.99", "exp"),
        lambda: (tw.nt_xent(A, temperature=torch.tensor(1e-40).exp()), nt_xent_dense(A.double(), 1.0)),
    ),
    # labels, targets, ids
    "labels float": (
        lambda: tw.supcon_loss(A, PAIRED.float()),
        DtypeError,
        ("labels holds integers", "float32", r"\.long\(\)"),
        lambda: (tw.supcon_loss(A, PAIRED.float().long()), supcon_dense(A.double(), PAIRED)),
    ),
    "labels list": (
        lambda: tw.supcon_loss(A, PAIRED.tolist()),
        DtypeError,
        ("labels is a tensor", "list", "as_tensor"),
        lambda: (tw.supcon_loss(A, torch.as_tensor(PAIRED.tolist())), supcon_dense(A.double(), PAIRED)),
    ),
    "labels short": (
        lambda: tw.supcon_loss(A, Y[:3]),
        ShapeError,
        (r"labels.* shape is \(6,\)", r"\(3,\)", "repeat"),
        lambda: (tw.supcon_loss(A, Y[:3].repeat(2)), supcon_dense(A.double(), Y % 3)),
    ),
    "labels column": (
        lambda: tw.supcon_loss(A, PAIRED[:, None]),
        ShapeError,
        (r"labels.* shape is \(6,\)", r"\(6, 1\)", "Flatten"),
        lambda: (tw.supcon_loss(A, PAIRED[:, None].flatten()), supcon_dense(A.double(), PAIRED)),
    ),
    "labels elsewhere": (lambda: tw.supcon_loss(A, Y.to("meta")), DeviceError, ("labels", "meta and cpu", "Move")),
    "target 6 of 6": (
        lambda: cross_entropy(target=Y + 1),
        RangeError,
        (r"class indices in \[0, 6\) or ignore_index=-100", "got 6 .1 out", "ignore_index"),
        lambda: (cross_entropy(target=Y + 1, ignore_index=6), ce(target=Y + 1, ignore_index=6)),
    ),
    "target -1": (
        lambda: cross_entropy(target=Y - 1),
        RangeError,
        (r"class indices in \[0, 6\)", "got -1", "ignore_index"),
        lambda: (cross_entropy(target=Y - 1, ignore_index=-1), ce(target=Y - 1, ignore_index=-1)),
    ),
    "target probabilities": (
        lambda: cross_entropy(target=A),
        DtypeError,
        ("target holds class indices", "float32", "dense loss such as torch.nn.functional"),
        lambda: (cross_entropy(label_smoothing=0.3), ce(label_smoothing=0.3)),
    ),
    "a classifier for each position": (
        lambda: cross_entropy(classifier=CUBE, target=TARGETS),
        ShapeError,
        (r"linear_weight is one classifier, \(classes, features\)", r"\(6, 3, 4\)", r"linear_weight\[:, k\]"),
        lambda: (
            sum(cross_entropy(classifier=CUBE[:, k], target=TARGETS[:, k]) for k in range(3)) / 3,
            torch.nn.functional.cross_entropy(torch.einsum("nd,ckd->nck", A, CUBE).double(), TARGETS),
        ),
    ),
    # tensors that are not plain
    "nested": (
        lambda: tw.clip_loss(NESTED, B, 1.0),
        DtypeError,
        ("image_features is one dense tensor", "nested", "torch.cat"),
        lambda: (tw.clip_loss(torch.cat(list(NESTED.unbind())), B, 1.0), clip(torch.ones(6, 4))),
    ),
    "nested, jagged": (
        lambda: cross_entropy(JAGGED),
        DtypeError,
        ("input is one dense tensor", "nested", "torch.cat"),
        lambda: (cross_entropy(torch.cat(list(JAGGED.unbind()))), ce(torch.ones(6, 4))),
    ),
    "nested classifier": (
        lambda: cross_entropy(classifier=JAGGED),
        DtypeError,
        ("linear_weight is one dense tensor", "nested", "torch.cat"),
        lambda: (cross_entropy(classifier=torch.cat(list(JAGGED.unbind()))), ce(classifier=torch.ones(6, 4))),
    ),
    "nested target": (
        lambda: cross_entropy(target=jagged(Y)),
        DtypeError,
        ("target is one dense tensor", "nested", "torch.cat"),
        lambda: (cross_entropy(target=torch.cat(list(jagged(Y).unbind()))), ce()),
    ),
    "nested labels": (
        lambda: tw.supcon_loss(A, jagged(PAIRED)),
        DtypeError,
        ("labels is one dense tensor", "nested", "torch.cat"),
        lambda: (tw.supcon_loss(A, torch.cat(list(jagged(PAIRED).unbind()))), supcon_dense(A.double(), PAIRED)),
    ),
    "sparse labels": (
        lambda: tw.supcon_loss(A, PAIRED.to_sparse()),
        DtypeError,
        ("labels is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
        lambda: (tw.supcon_loss(A, PAIRED.to_sparse().to_dense()), supcon_dense(A.double(), PAIRED)),
    ),
    "sparse target": (
        lambda: cross_entropy(target=Y.to_sparse()),
        DtypeError,
        ("target is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
        lambda: (cross_entropy(target=Y.to_sparse().to_dense()), ce()),
    ),
    "sparse scale": (
        lambda: tw.clip_loss(A, B, torch.ones(1).to_sparse()),
        DtypeError,
        ("logit_scale is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
        lambda: (tw.clip_loss(A, B, torch.ones(1).to_sparse().to_dense()), clip()),
    ),
    "sparse mask": (
        lambda: tw.info_nce(A, B, A, negative_mask=(Y > 2).to_sparse()),
        DtypeError,
        ("negative_mask is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
        lambda: (tw.info_nce(A, B, A, negative_mask=(Y > 2).to_sparse().to_dense()), infonce(A, negative_mask=Y > 2)),
    ),
    "fake features": (
        lambda: tw.clip_loss(FAKE, FAKE, 1.0),
        DtypeError,
        ("image_features holds values", "fake tensor", "inside of its mode"),
        lambda: (inside_its_mode(lambda: tw.clip_loss(FAKE, FAKE, 1.0)), torch.tensor(0.0)),
    ),
    "fake target": (
        lambda: cross_entropy(target=FAKE[:, 0].long()),
        DtypeError,
        ("target holds values", "fake tensor", "inside of its mode"),
        lambda: (inside_its_mode(lambda: cross_entropy(FAKE, FAKE, FAKE[:, 0].long())), torch.tensor(0.0)),
    ),
    "fake scale": (
        lambda: tw.clip_loss(A, B, FAKE[0, 0]),
        DtypeError,
        ("logit_scale holds values", "fake tensor", "inside of its mode"),
        lambda: (inside_its_mode(lambda: tw.clip_loss(FAKE, FAKE, FAKE[0, 0])), torch.tensor(0.0)),
    ),
    "target list": (
        lambda: cross_entropy(target=Y.tolist()),
        DtypeError,
        ("target is a tensor of class indices", "list", r"torch\.as_tensor\(\)"),
        lambda: (cross_entropy(target=torch.as_tensor(Y.tolist())), ce()),
    ),
    "target short": (
        lambda: cross_entropy(target=Y[:5]),
        ShapeError,
        (r"one entry for each hidden state, \(6,\)", r"\(5,\)", "shift=1"),
        lambda: (cross_entropy(A[None], B, Y[None], shift=1), ce(A[None], B, Y[None], shift=1)),
    ),
    "target elsewhere": (
        lambda: cross_entropy(target=Y.to("meta")),
        DeviceError,
        ("target and input", "meta and cpu", "Move"),
    ),
    "hidden list": (
        lambda: cross_entropy(A.tolist()),
        DtypeError,
        ("input is a tensor", "list", "as_tensor"),
        lambda: (cross_entropy(torch.as_tensor(A.tolist())), ce()),
    ),
    "hidden number": (
        lambda: cross_entropy(torch.tensor(1.0)),
        ShapeError,
        (r"input must be \(\.\.\., features\)", r"\(\)", "Add"),
        lambda: (
            cross_entropy(torch.tensor(1.0)[None], B[:, :1], torch.tensor(2)),
            ce(torch.ones(1, 1), B[:, :1], torch.tensor([2])),
        ),
    ),
    "no tokens to shift": (
        lambda: cross_entropy(A[0], B, torch.tensor(1), shift=1),
        ShapeError,
        ("tokens, features", r"\(4,\)", "Add|yourself"),
        lambda: (cross_entropy(A[0], B, torch.tensor(1)), ce(A[:1], B, torch.tensor([1]))),
    ),
    "classifier width": (
        lambda: cross_entropy(classifier=B[:, :2]),
        ShapeError,
        ("same number of features", r"\(6, 2\)", "classifier of another model"),
    ),
    "bias length": (
        lambda: cross_entropy(linear_bias=A[0]),
        ShapeError,
        ("linear_bias has one entry for each of 6", r"\(4,\)", "another classifier\\?"),
    ),
    "bias integers": (
        lambda: tw.linear_logsumexp(A, B, bias=Y),
        DtypeError,
        ("bias holds floating", "int64", r"\.float\(\)"),
        lambda: (tw.linear_logsumexp(A, B, bias=Y.float()), lse(bias=Y)),
    ),
    "bias matrix": (
        lambda: tw.linear_logsumexp(A, B, bias=A[:, :1]),
        ShapeError,
        ("bias must be of 1 dimension,", r"\(6, 1\)", r"Reshape.* \.reshape\(-1\)"),
        lambda: (tw.linear_logsumexp(A, B, bias=A[:, :1].reshape(-1)), lse(bias=A[:, 0])),
    ),
    "bias elsewhere": (
        lambda: cross_entropy(linear_bias=AWAY[:, 0]),
        DeviceError,
        ("linear_bias", "meta and cpu", "Move"),
    ),
    "weight length": (
        lambda: cross_entropy(weight=A[0]),
        ShapeError,
        ("weight has one entry for each of 6", r"\(4,\)", "another classifier\\?"),
    ),
    "weight learned": (
        lambda: cross_entropy(weight=WEIGHT),
        GradientError,
        ("weight is a constant", "requires grad", "detach"),
        lambda: (cross_entropy(weight=WEIGHT.detach()), ce()),
    ),
    # negatives, masks
    "negatives flat": (
        lambda: tw.info_nce(A, B, A[0]),
        ShapeError,
        (r"negative_keys must be \(M, d\)", r"\(4,\)", "Reshape"),
        lambda: (tw.info_nce(A, B, A[0].reshape(1, -1)), infonce(A[:1])),
    ),
    "negatives list": (
        lambda: tw.info_nce(A, B, A.tolist()),
        ShapeError,
        (r"negative_keys must be \(M, d\)", "list", r"torch\.as_tensor\(\)"),
        lambda: (tw.info_nce(A, B, torch.as_tensor(A.tolist())), infonce(A)),
    ),
    "negatives width": (
        lambda: tw.info_nce(A, B, A[:, :3]),
        ShapeError,
        ("query and negative_keys", r"\(6, 3\)", "projection"),
    ),
    "own negatives rows": (
        lambda: tw.info_nce(A, B, A[:5, None]),
        ShapeError,
        ("same number of rows", r"\(5, 1, 4\)", "filter"),
    ),
    "mask alone": (
        lambda: tw.info_nce(A, B, negative_mask=Y > 2),
        ConfigError,
        ("negative_mask marks", "there are none", "Pass both"),
        lambda: (tw.info_nce(A, B, A, negative_mask=Y > 2), infonce(A, negative_mask=Y > 2)),
    ),
    "mask numbers": (
        lambda: tw.info_nce(A, B, A, negative_mask=Y),
        DtypeError,
        ("negative_mask is a bool tensor", "int64", r"\.bool\(\)"),
        lambda: (tw.info_nce(A, B, A, negative_mask=Y.bool()), infonce(A, negative_mask=Y != 0)),
    ),
    "mask list": (
        lambda: tw.info_nce(A, B, A, negative_mask=[True] * 6),
        DtypeError,
        ("negative_mask is a bool tensor", "list", r"torch\.as_tensor\(\)"),
        lambda: (tw.info_nce(A, B, A, negative_mask=torch.as_tensor([True] * 6)), infonce(A)),
    ),
    "mask short": (
        lambda: tw.info_nce(A, B, A, negative_mask=Y[:5] > 2),
        ShapeError,
        (r"one entry for each negative, \(6,\)", r"\(5,\)", "filter drop"),
    ),
    "mask column": (
        lambda: tw.info_nce(A, B, A, negative_mask=Y[:, None] > 2),
        ShapeError,
        (r"one entry for each negative, \(6,\)", r"\(6, 1\)", "Reshape it"),
        lambda: (tw.info_nce(A, B, A, negative_mask=(Y[:, None] > 2).reshape(6)), infonce(A, negative_mask=Y > 2)),
    ),
    "ids float": (
        lambda: tw.info_nce(A, B, query_ids=PAIRED.float()),
        DtypeError,
        ("query_ids holds integers", "float32", r"\.long\(\)"),
        lambda: (
            tw.info_nce(A, B, query_ids=PAIRED.float().long()),
            infonce(query_ids=PAIRED, key_ids=PAIRED),
        ),
    ),
    "ids length": (
        lambda: tw.info_nce(A, B, A[:2], key_ids=Y[:3]),
        ShapeError,
        (r"key_ids.* shape is \(6,\) or \(8,\)", r"\(3,\)", "repeat"),
        lambda: (
            tw.info_nce(A, B, A[:2], key_ids=Y[:3].repeat(2)),
            infonce(A[:2], query_ids=Y % 3, key_ids=Y % 3),
        ),
    ),
    "nothing to tell apart": (
        lambda: tw.info_nce(A, B, in_batch=False),
        ConfigError,
        ("in_batch=False", "without negative_keys", "Pass negative_keys"),
        lambda: (tw.info_nce(A, B, A, in_batch=False), infonce(A, in_batch=False)),
    ),
    "symmetric alone": (
        lambda: tw.info_nce(A, B, A, in_batch=False, symmetric=True),
        ConfigError,
        ("symmetric=True", "all queries", "in_batch=True"),
        lambda: (tw.info_nce(A, B, A, in_batch=True, symmetric=True), infonce(A, symmetric=True)),
    ),
    "hardness that does not fit float32": (
        lambda: tw.info_nce(A, B, hardness=1e300),
        RangeError,
        ("hardness must fit float32", "1e\\+300", "Check"),
    ),
    "want, a number": (
        lambda: tw.linear_token_stats(A, B, want=5),
        DtypeError,
        ("want is a sequence of names", "5", "Pass a tuple"),
        lambda: (tw.linear_token_stats(A, B, want=("logsumexp",)).logsumexp, lse()),
    ),
    "filter_tolerance, an array": (
        lambda: tw.TileOptions(filter_tolerance=np.array([0.1, 0.2])),
        ConfigError,
        ("filter_tolerance is a probability mass", "array", "0 is exact"),
    ),
    "hardness, negative": (
        lambda: tw.info_nce(A, B, hardness=-1.0),
        RangeError,
        ("hardness must not be negative", "-1.0", "Pass 0 for none"),
        lambda: (tw.info_nce(A, B, hardness=0), infonce()),
    ),
    "hardness, a tensor": (
        lambda: tw.info_nce(A, B, hardness=torch.ones(6)),
        DtypeError,
        ("hardness is a number", "Tensor", "Pass one number"),
        lambda: (tw.info_nce(A, B, hardness=2.0), infonce(hardness=2.0)),
    ),
    "hardness_mode, unknown": (
        lambda: tw.info_nce(A, B, hardness=1.0, hardness_mode="hard"),
        ConfigError,
        ("no hardness_mode 'hard'", "choose one of", "hard_negatives"),
        lambda: (
            tw.info_nce(A, B, hardness=1.0, hardness_mode="all_negatives"),
            infonce(hardness=1.0),
        ),
    ),
    "hardness of no negatives": (
        lambda: tw.info_nce(A, B, hardness=1.0, hardness_mode="hard_negatives"),
        ConfigError,
        ("needs negative_keys", "None", "in_batch_negatives"),
        lambda: (
            tw.info_nce(A, B, hardness=1.0, hardness_mode="in_batch_negatives"),
            infonce(hardness=1.0, hardness_mode="in_batch_negatives"),
        ),
    ),
    "hardness of keys that are no negatives": (
        lambda: tw.info_nce(A, B, A, in_batch=False, hardness=1.0, hardness_mode="in_batch_negatives"),
        ConfigError,
        ("needs in_batch=True", "False", "hard_negatives"),
        lambda: (
            tw.info_nce(A, B, A, in_batch=False, hardness=1.0, hardness_mode="hard_negatives"),
            infonce(A, in_batch=False, hardness=1.0, hardness_mode="hard_negatives"),
        ),
    ),
    # words and options
    "reduction": (
        lambda: tw.clip_loss(A, B, 1.0, reduction="avg"),
        ConfigError,
        ("no reduction", "avg", "none, sum, mean"),
        lambda: (tw.clip_loss(A, B, 1.0, reduction="sum"), 6 * clip()),
    ),
    "reduction None": (
        lambda: cross_entropy(reduction=None),
        ConfigError,
        ("no reduction", "None", "none, sum, mean"),
        lambda: (cross_entropy(reduction="none"), ce(reduction="none")),
    ),
    "options dict": (
        lambda: tw.nt_xent(A, options={}),
        DtypeError,
        ("options is a TileOptions", "dict", r"tilewise.TileOptions\("),
        lambda: (tw.nt_xent(A, options=tw.TileOptions()), nt_xent_dense(A.double())),
    ),
    "group number": (lambda: tw.nt_xent(A, group=4), DtypeError, ("process group or None", "int", "group.WORLD")),
    "triton on the CPU": (
        lambda: tw.nt_xent(A.double(), options=OPTIONS(backend="triton")),
        BackendError,
        (
            "backend 'triton' cannot serve",
            r"float64 on cpu: (it needs a CUDA|it multiplies|the package triton is not installed)",
            'backend="auto"',
        ),
        lambda: (tw.nt_xent(A.double(), options=OPTIONS(backend="auto")), nt_xent_dense(A.double())),
    ),
    "backend": (
        lambda: OPTIONS(backend="cuda"),
        ConfigError,
        ("no backend", "cuda", "auto, triton, torch"),
        lambda: with_options(backend="auto"),
    ),
    "precision": (
        lambda: OPTIONS(precision="tf32"),
        ConfigError,
        ("no precision", "tf32", "torch, highest, high"),
        lambda: with_options(precision="high"),
    ),
    "ring gradients": (
        lambda: OPTIONS(ring_gradients="half"),
        ConfigError,
        ("no ring_gradients", "half", "choose one of"),
        lambda: with_options(ring_gradients="features"),
    ),
    "batch_invariant 1": (
        lambda: OPTIONS(batch_invariant=1),
        ConfigError,
        ("batch_invariant is True or False", "got 1", "Convert it"),
        lambda: with_options(batch_invariant=bool(1)),
    ),
    "batch_invariant with a filter": (
        lambda: OPTIONS(batch_invariant=True, filter_tolerance=0.1),
        ConfigError,
        ("batch_invariant=True needs exact", "filter_tolerance=0.1", "Remove one"),
        lambda: with_options(batch_invariant=True),
    ),
    "batch_invariant in one pass": (
        lambda: OPTIONS(batch_invariant=True, gradients="forward"),
        ConfigError,
        ("batch_invariant=True needs exact", 'gradients="forward"', "Remove one"),
        lambda: with_options(gradients="forward"),
    ),
    "batch_invariant contrastive loss": (
        lambda: tw.clip_loss(A, B, 1.0, options=OPTIONS(batch_invariant=True)),
        ConfigError,
        ("is for linear_cross_entropy", "got another loss", "batch_invariant=False"),
        lambda: (tw.clip_loss(A, B, 1.0, options=OPTIONS(batch_invariant=False)), clip()),
    ),
    "batch_invariant over a group": (
        lambda: tw.linear_logsumexp(A, B, group=SimpleNamespace(group_name="0"), options=OPTIONS(batch_invariant=True)),
        ConfigError,
        ("works in one process", "got a group whose", "group=None"),
        lambda: (tw.linear_logsumexp(A, B, group=None, options=OPTIONS(batch_invariant=True)), lse()),
    ),
    "gradients when": (
        lambda: OPTIONS(gradients="never"),
        ConfigError,
        ("no gradients", "never", "choose one of"),
        lambda: with_options(gradients="forward"),
    ),
    "workspace 0": (
        lambda: OPTIONS(workspace_mib=0),
        ConfigError,
        ("workspace_mib must be at least 1", "0", "leave it out for the default"),
        lambda: with_options(workspace_mib=256),
    ),
    "workspace negative": (
        lambda: OPTIONS(workspace_mib=-5),
        ConfigError,
        ("workspace_mib must be at least 1", "-5", "leave it out"),
        lambda: with_options(workspace_mib=256),
    ),
    "workspace half": (
        lambda: OPTIONS(workspace_mib=1.5),
        ConfigError,
        ("workspace_mib is a whole number", "1.5", "Round"),
        lambda: with_options(workspace_mib=round(1.5)),
    ),
    "tolerance 1": (
        lambda: OPTIONS(filter_tolerance=1.0),
        ConfigError,
        ("filter_tolerance is a probability", "1.0", "0 is exact"),
    ),
    "tolerance nan": (
        lambda: OPTIONS(filter_tolerance=math.nan),
        ConfigError,
        ("filter_tolerance", "nan", "0 is exact"),
    ),
    "z_loss -1": (lambda: cross_entropy(z_loss=-1.0), RangeError, ("z_loss is at least 0", "-1.0", "has no minimum")),
    "a class weight of infinity": (
        lambda: cross_entropy(weight=1.0 / COUNTS),
        RangeError,
        ("weight, one per class, must be finite", r"inf \(1 of 6\)", "Set the weight of a class without examples to 0"),
        lambda: (
            cross_entropy(target=RARE, weight=torch.where(COUNTS > 0, 1.0 / COUNTS, 0.0)),
            ce(target=RARE, class_weight=torch.where(COUNTS > 0, 1.0 / COUNTS, 0.0).double()),
        ),
    ),
    "an id that means none": (
        lambda: tw.info_nce(A, B, A, query_ids=torch.full((6,), NO_ID), group=SimpleNamespace(group_name="0")),
        RangeError,
        ("over a group, an id of", "means none", "Use other ids"),
        lambda: (tw.info_nce(A, B, A, query_ids=PAIRED), infonce(A, query_ids=PAIRED, key_ids=PAIRED)),
    ),
    "a temperature for each row, and hardness": (
        lambda: tw.info_nce(A, B, temperature=EACH, hardness=1.0),
        ShapeError,
        ("temperature is one number", r"\(6,\)", "If every row has its own value, pass hardness=0.0"),
        lambda: (
            tw.info_nce(A, B, temperature=EACH, hardness=0.0),
            oracles.info_nce_dense(A.double() / EACH[:, None], B.double(), temperature=1.0),
        ),
    ),
    "a temperature for each of two views": (
        lambda: tw.nt_xent(A, temperature=EACH),
        ShapeError,
        ("temperature is one number", r"\(6,\)", "Pass one number$"),
        lambda: (tw.nt_xent(A, temperature=2.0), nt_xent_dense(A.double(), 2.0)),
    ),
    "a scale for each state": (
        lambda: cross_entropy(logit_scale=EACH),
        ShapeError,
        ("logit_scale is one number", r"\(6,\)", "multiply the states in input by it"),
        lambda: (cross_entropy(A * EACH[:, None]), ce(A * EACH[:, None])),
    ),
    "temperatures of tokens in a list": (
        lambda: tw.linear_token_stats(A, B, Y, temperature=EACH.tolist()),
        DtypeError,
        (r"temperature is a number, or a tensor of shape \(6,\)", "list", r"torch\.as_tensor\(\)"),
        lambda: (
            tw.linear_token_stats(A, B, temperature=torch.as_tensor(EACH.tolist())).logsumexp,
            (A.double() @ B.double().T / EACH[:, None]).logsumexp(1),
        ),
    ),
    "half and single precision": (
        lambda: tw.clip_loss(A, B.bfloat16(), 1.0),
        DtypeError,
        ("same type", "float32 and torch.bfloat16", r"Convert one of them with \.to\(\), or run under torch\.autocast"),
        lambda: (under_autocast(lambda: tw.clip_loss(A, B.bfloat16(), 1.0)), clip(A.bfloat16(), B.bfloat16())),
    ),
    "a target of floats": (
        lambda: cross_entropy(target=Y.float()),
        DtypeError,
        ("target holds class indices", "float32", r"\.long\(\), if its values are whole"),
        lambda: (cross_entropy(target=Y.float().long()), ce()),
    ),
    "a target of another shape": (
        lambda: cross_entropy(target=Y[:, None]),
        ShapeError,
        ("one entry for each hidden state", r"\(6, 1\)", "Reshape it"),
        lambda: (cross_entropy(target=Y[:, None].reshape(6)), ce()),
    ),
    "labels of text": (
        lambda: tw.supcon_loss(A, WORDS),
        DtypeError,
        (
            "labels is a tensor of integers",
            "list",
            r"number = \{name: i for i, name in enumerate\(sorted\(set\(names\)\)\)\}",
        ),
        lambda: (tw.supcon_loss(A, numbered(WORDS)), supcon_dense(A.double(), PAIRED)),
    ),
    "labels in an array of objects": (
        lambda: tw.supcon_loss(A, np.array(PAIRED.tolist(), dtype=object)),
        DtypeError,
        ("labels is a tensor of integers", "ndarray", r"torch\.as_tensor\(values\.astype\('int64'\)\)"),
        lambda: (
            tw.supcon_loss(A, torch.as_tensor(np.array(PAIRED.tolist(), dtype=object).astype("int64"))),
            supcon_dense(A.double(), PAIRED),
        ),
    ),
    "views in a list": (
        lambda: tw.nt_xent(list(A)),
        DtypeError,
        ("features is a tensor", "list", r"torch\.stack\(\)"),
        lambda: (tw.nt_xent(torch.stack(list(A))), nt_xent_dense(A.double())),
    ),
    "an array": (
        lambda: tw.nt_xent(A.numpy()),
        DtypeError,
        ("features is a tensor", "ndarray", r"torch\.as_tensor\(\)"),
        lambda: (tw.nt_xent(torch.as_tensor(A.numpy())), nt_xent_dense(A.double())),
    ),
    "a dict": (
        lambda: tw.nt_xent({"features": A}),
        DtypeError,
        ("features is a tensor", "dict", "Pass a tensor"),
        lambda: (tw.nt_xent({"features": A}["features"]), nt_xent_dense(A.double())),
    ),
    "a complex bias": (
        lambda: tw.linear_logsumexp(A, B, bias=COMPLEX[:, 0]),
        DtypeError,
        ("bias holds floating", "complex64", r"Pass its real part, \.real"),
        lambda: (tw.linear_logsumexp(A, B, bias=COMPLEX[:, 0].real), lse(bias=A[:, 0].double())),
    ),
    "in_batch as text": (
        lambda: tw.info_nce(A, B, A, in_batch="False"),
        ConfigError,
        ("in_batch is True or False", "'False'", "Pass True or False"),
        lambda: (tw.info_nce(A, B, A, in_batch=False), infonce(A, in_batch=False)),
    ),
    "symmetric of NumPy": (
        lambda: tw.info_nce(A, B, symmetric=np.True_),
        ConfigError,
        ("symmetric is True or False", "True", r"Convert it with bool\(\)"),
        lambda: (tw.info_nce(A, B, symmetric=bool(np.True_)), infonce(symmetric=True)),
    ),
    # statistics of tokens
    "a statistic without targets": (
        lambda: tw.linear_token_stats(A, B, want=("log_prob",)),
        ConfigError,
        ("log_prob needs a target", "no target was passed", "Pass target, or remove it from want"),
        lambda: (tw.linear_token_stats(A, B, Y, want=("log_prob",)).mean("log_prob"), -ce()),
    ),
    "a statistic that is none": (
        lambda: tw.linear_token_stats(A, B, want=("perplexity",)),
        ConfigError,
        ("want is a sequence of names among", "'perplexity'", "Use one of these"),
        lambda: (tw.linear_token_stats(A, B, want=("logsumexp",)).logsumexp, lse()),
    ),
    "picked without pick": (
        lambda: tw.linear_token_stats(A, B, want=("picked",)),
        ConfigError,
        ("classes in pick", "no pick was passed", r"Pass pick, \(\.\.\., K\) class ids"),
        lambda: (tw.linear_token_stats(A, B, want=("picked",), pick=PICKS).picked, picked(PICKS)),
    ),
    "the accuracy of nothing": (
        lambda: tw.linear_token_stats(A, B, Y, want=("log_prob",)).accuracy,
        ConfigError,
        ('accuracy requires "correct"', "not computed", r'Pass target, and want=\("correct",\) or more'),
        lambda: (
            tw.linear_token_stats(A, B, Y, want=("correct",)).accuracy,
            (LOGITS.argmax(1) == Y).double().mean(),
        ),
    ),
    "the mean of what was not computed": (
        lambda: tw.linear_token_stats(A, B, Y, want=("log_prob",)).mean("entropy"),
        ConfigError,
        ("the mean of 'entropy' is not available", "Computed were: log_prob", "Add it to want"),
        lambda: (tw.linear_token_stats(A, B, Y, want=("entropy",)).mean("entropy"), entropy().mean()),
    ),
    "the mean of what needs targets": (
        lambda: tw.linear_token_stats(A, B).mean("log_prob"),
        ConfigError,
        ("the mean of 'log_prob' is not available", "entropy, argmax", "Pass target, and add it to want"),
        lambda: (tw.linear_token_stats(A, B, Y, want=("log_prob",)).mean("log_prob"), -ce()),
    ),
    "the mean of picked": (
        lambda: tw.linear_token_stats(A, B, Y, pick=PICKS).mean("picked"),
        ConfigError,
        ("the mean of 'picked' is not available", "log_prob", r"use picked\[valid\]\.mean\(0\)"),
        lambda: (mean_of_picked(tw.linear_token_stats(A, B, Y, pick=PICKS)), picked(PICKS).mean(0)),
    ),
    "the mean of a field that is none": (
        lambda: tw.linear_token_stats(A, B, Y).mean("perplexity"),
        ConfigError,
        ("the mean of 'perplexity' is not available", "log_prob", "Choose one of log_prob, entropy"),
        lambda: (tw.linear_token_stats(A, B, Y).mean("entropy"), entropy().mean()),
    ),
    "numbers of other ids": (
        lambda: tw.linear_sparse_distillation_loss(A, B, PICKS, -torch.ones(6, 1)),
        ShapeError,
        ("one number for each id", r"\(6, 1\) numbers and \(6, 2\) ids", "Pass K of both"),
        lambda: (tw.linear_sparse_distillation_loss(A, B, PICKS, -torch.ones(6, 2)), sparse(PICKS)),
    ),
    # what is not supported
    "a second derivative": (
        lambda: second_derivative(detach=False),
        GradientError,
        ("first derivatives only", "second backward", "Otherwise detach the gradient"),
        lambda: (second_derivative(detach=True), gradient_norm()),
    ),
    "an explanation of another function": (
        lambda: tw.explain(torch.relu, A),
        ConfigError,
        ("explain is for losses of tilewise", "relu called none", r"Pass one of them, such as tilewise\.clip_loss"),
        lambda: (torch.tensor(tw.explain(tw.clip_loss, A, B, 1.0).calls[0].rows), torch.tensor(6)),
    ),
    "an explanation of ranks": (
        lambda: tw.explain(tw.retrieval_ranks, A, B),
        ConfigError,
        ("whose strategy depends on no value", "retrieval_ranks reads values", "there is nothing to explain"),
    ),
    "a group that is not there": (
        lambda: tw.nt_xent(A, group=SimpleNamespace(group_name="0")),
        GroupError,
        ("no process group '0'", "not initialized", "or pass group=None"),
        lambda: (tw.nt_xent(A, group=None), nt_xent_dense(A.double())),
    ),
    "a mesh for a group": (
        lambda: tw.nt_xent(A, group=SimpleNamespace(get_group=lambda: None)),
        DtypeError,
        ("process group or None", "SimpleNamespace", r"Pass its \.get_group\(\)"),
        lambda: (tw.nt_xent(A, group=SimpleNamespace(get_group=lambda: None).get_group()), nt_xent_dense(A.double())),
    ),
    "a group of other ranks": (
        lambda: tw.nt_xent(A, group=-100),
        DtypeError,
        ("process group or None", "int -100", "Call the loss only on its members"),
    ),
    "tolerance text": (
        lambda: OPTIONS(filter_tolerance="0"),
        ConfigError,
        ('filter_tolerance is a .* or "rounding"', "'0'", "0 is exact"),
    ),
}
