"""Bad inputs of the losses and their options: the call, the error type, and what its message must contain."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.errors import BackendError, ConfigError, DeviceError, DtypeError, GradientError, RangeError, ShapeError

A = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
B = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), dim=1)
Y = torch.arange(6)
AWAY = torch.empty(6, 4, device="meta")
WEIGHT = torch.ones(6, requires_grad=True)
OPTIONS = tw.TileOptions
FAKE = FakeTensorMode().from_tensor(torch.ones(6, 4))
JAGGED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)], layout=torch.jagged)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested tensors with a stride are a prototype of PyTorch
    NESTED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)])


def cross_entropy(hidden=A, classifier=B, target=Y, **settings):
    return tw.linear_cross_entropy(hidden, classifier, target, **settings)


def on_mps(call):
    """The call with fake features on an Apple GPU; no such device is needed."""
    with FakeTensorMode():
        features = torch.empty(6, 4, device="mps")
        return call(features, features)


# name: (call, error, (what is expected, what was passed, what to do))
BAD = {
    # features
    "a list": (
        lambda: tw.clip_loss(A.tolist(), B, 1.0),
        DtypeError,
        ("image_features is a tensor", "list", "as_tensor"),
    ),
    "integers": (
        lambda: tw.clip_loss(A.long(), B, 1.0),
        DtypeError,
        ("image_features holds floating", "int64", r"\.float\(\)"),
    ),
    "complex": (
        lambda: tw.nt_xent(A.to(torch.complex64)),
        DtypeError,
        ("features holds floating", "complex64", r"\.float\(\)"),
    ),
    "one dimension": (
        lambda: tw.clip_loss(A[0], B, 1.0),
        ShapeError,
        (r"image_features must be \(rows, features\)", r"\(4,\)", r"Reshape.* \.unsqueeze\(0\)"),
    ),
    "sparse": (
        lambda: tw.clip_loss(A.to_sparse(), B, 1.0),
        DtypeError,
        ("image_features is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
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
    "a layer for its weight": (
        lambda: cross_entropy(classifier=torch.nn.Linear(4, 6, device="meta")),
        DtypeError,
        ("linear_weight is a tensor", "Linear", r"\.weight"),
    ),
    "a module for its output": (
        lambda: cross_entropy(torch.nn.ReLU()),
        DtypeError,
        ("input is a tensor", "ReLU", "Pass its output"),
    ),
    "classifier transposed": (
        lambda: cross_entropy(classifier=torch.ones(4, 9)),
        ShapeError,
        ("input and linear_weight", r"\(6, 4\) and \(4, 9\)", r"linear_weight\.T"),
    ),
    "temperature in third place": (
        lambda: tw.info_nce(A, B, 0.1),
        ShapeError,
        ("negative_keys must be", "float", "temperature="),
    ),
    "three dimensions": (
        lambda: tw.nt_xent(A[None]),
        ShapeError,
        (r"features must be \(rows, features\)", r"\(1, 6, 4\)", r"flatten"),
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
        ("same type", "float32 and torch.float64", "Convert|autocast"),
    ),
    "other device": (lambda: tw.clip_loss(A, AWAY, 1.0), DeviceError, ("one device", "cpu and meta", "Move")),
    "odd views": (lambda: tw.nt_xent(A[:5]), ShapeError, ("even number of rows", r"\(5, 4\)", "torch.cat")),
    # numbers
    "scale of two": (
        lambda: tw.clip_loss(A, B, torch.ones(2)),
        ShapeError,
        ("logit_scale is one number", r"\(2,\)", "features"),
    ),
    "scale of integers": (
        lambda: tw.clip_loss(A, B, torch.tensor(3)),
        DtypeError,
        ("logit_scale is a floating", "int64", r"\.float\(\)"),
    ),
    "scale as text": (lambda: tw.clip_loss(A, B, "14"), DtypeError, ("logit_scale is a number", "str", r"float\(\)")),
    "scale as bool": (lambda: tw.clip_loss(A, B, True), DtypeError, ("logit_scale is a number", "bool", r"float\(\)")),
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
        ("logit_bias is a number", "NoneType", "Pass a number, such as 1"),
    ),
    "temperature 0": (
        lambda: tw.info_nce(A, B, temperature=0.0),
        RangeError,
        ("temperature must be positive", "0.0", "logarithm"),
    ),
    "temperature -1": (
        lambda: tw.nt_xent(A, temperature=-1),
        RangeError,
        ("temperature must be positive", "-1", "exp"),
    ),
    "temperature nan": (
        lambda: tw.nt_xent(A, temperature=math.nan),
        RangeError,
        ("temperature must be positive", "nan", "exp"),
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
    ),
    "z_loss nan": (lambda: cross_entropy(z_loss=math.nan), RangeError, ("z_loss must be finite", "nan", "Check")),
    "z_loss None": (
        lambda: cross_entropy(z_loss=None),
        DtypeError,
        ("z_loss is a number", "NoneType", "Pass a number, such as 1"),
    ),
    "softcap -1": (lambda: cross_entropy(softcap=-1), RangeError, ("softcap is a positive number", "-1", "None or 0")),
    "softcap 1e39": (lambda: cross_entropy(softcap=1e39), RangeError, ("softcap must fit float32", r"1e\+39", "Check")),
    "softcap text": (
        lambda: tw.linear_logsumexp(A, B, softcap="30"),
        DtypeError,
        ("softcap is a number", "str", r"float\(\)"),
    ),
    "shift -1": (
        lambda: cross_entropy(A[None], B, Y[None], shift=-1),
        RangeError,
        ("shift is a whole number", "-1", "shift=1"),
    ),
    "shift half": (
        lambda: cross_entropy(A[None], B, Y[None], shift=0.5),
        RangeError,
        ("shift is a whole number", "0.5", "shift=1"),
    ),
    "shift None": (
        lambda: cross_entropy(A[None], B, Y[None], shift=None),
        RangeError,
        ("shift is a whole number", "None", "shift=1"),
    ),
    "ignore_index half": (
        lambda: cross_entropy(ignore_index=1.5),
        DtypeError,
        ("ignore_index is a whole number", "float 1.5", "marks padding"),
    ),
    "ignore_index bool": (
        lambda: tw.linear_token_stats(A, B, Y, ignore_index=True),
        DtypeError,
        ("ignore_index is a whole number", "bool True", "marks padding"),
    ),
    "pick half": (
        lambda: tw.linear_token_stats(A, B, Y, pick=A),
        DtypeError,
        ("pick holds integers", "float32", r"\.long\(\)"),
    ),
    "pick without K": (
        lambda: tw.linear_token_stats(A, B, Y, pick=Y),
        ShapeError,
        (r"pick has K class ids for each hidden state, \(6, K\)", r"\(6,\)", "axes are those of input"),
    ),
    "pick out of range": (
        lambda: tw.linear_token_stats(A, B, Y, pick=Y[:, None] + 1),
        RangeError,
        (r"class ids in \[0, 6\)", "6", "Pass ids"),
    ),
    "temperature of each token learned": (
        lambda: tw.linear_token_stats(A, B, Y, temperature=WEIGHT),
        GradientError,
        ("temperature is a constant", "requires grad", "detach"),
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
    ),
    "teacher learned": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None], -WEIGHT[:, None]),
        GradientError,
        ("teacher_log_probs is a constant", "requires grad", "detach"),
    ),
    "a teacher's id twice": (
        lambda: tw.linear_sparse_distillation_loss(A, B, torch.ones(6, 2).long(), -torch.ones(6, 2)),
        RangeError,
        ("teacher_ids has each id of a token once", "1 twice", "negative ids"),
    ),
    "a teacher without ids": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y[:, None][:, :0], -torch.ones(6, 0)),
        ShapeError,
        ("teacher_ids has at least one class id for each token", r"\(6, 0\)", "last axis"),
    ),
    "one axis of ids": (
        lambda: tw.linear_sparse_distillation_loss(A, B, Y, -torch.ones(6)),
        ShapeError,
        ("teacher_ids has K class ids for each hidden state", r"\(6,\)", "axes are those of input"),
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
    ),
    "ignore_index too large": (
        lambda: cross_entropy(ignore_index=2**70),
        RangeError,
        ("ignore_index must fit 64 bits", "71 bits", "marks padding"),
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
    ),
    "learned temperature 1e-40": (
        lambda: tw.nt_xent(A, temperature=torch.tensor(1e-40)),
        RangeError,
        ("1 / temperature must fit float32", "temperature of 9.99", "exp"),
    ),
    # labels, targets, ids
    "labels float": (
        lambda: tw.supcon_loss(A, Y.float()),
        DtypeError,
        ("labels holds integers", "float32", r"\.long\(\)"),
    ),
    "labels list": (lambda: tw.supcon_loss(A, Y.tolist()), DtypeError, ("labels is a tensor", "list", "as_tensor")),
    "labels short": (lambda: tw.supcon_loss(A, Y[:5]), ShapeError, (r"labels.* shape is \(6,\)", r"\(5,\)", "repeat")),
    "labels column": (
        lambda: tw.supcon_loss(A, Y[:, None]),
        ShapeError,
        (r"labels.* shape is \(6,\)", r"\(6, 1\)", "Flatten"),
    ),
    "labels elsewhere": (lambda: tw.supcon_loss(A, Y.to("meta")), DeviceError, ("labels", "meta and cpu", "Move")),
    "target 6 of 6": (
        lambda: cross_entropy(target=Y + 1),
        RangeError,
        (r"class indices in \[0, 6\) or ignore_index=-100", "got 6 .1 out", "ignore_index"),
    ),
    "target -1": (
        lambda: cross_entropy(target=Y - 1),
        RangeError,
        (r"class indices in \[0, 6\)", "got -1", "ignore_index"),
    ),
    "target probabilities": (
        lambda: cross_entropy(target=A),
        DtypeError,
        ("target holds class indices", "float32", "dense loss such as torch.nn.functional"),
    ),
    "a classifier for each position": (
        lambda: cross_entropy(classifier=torch.ones(6, 3, 4), target=Y[:, None].expand(6, 3)),
        ShapeError,
        (r"linear_weight is one classifier, \(classes, features\)", r"\(6, 3, 4\)", r"linear_weight\[:, k\]"),
    ),
    # tensors that are not plain
    "nested": (
        lambda: tw.clip_loss(NESTED, B, 1.0),
        DtypeError,
        ("image_features is one dense tensor", "nested", "torch.cat"),
    ),
    "nested, jagged": (
        lambda: cross_entropy(JAGGED),
        DtypeError,
        ("input is one dense tensor", "nested", "torch.cat"),
    ),
    "nested classifier": (
        lambda: cross_entropy(classifier=JAGGED),
        DtypeError,
        ("linear_weight is one dense tensor", "nested", "torch.cat"),
    ),
    "nested target": (
        lambda: cross_entropy(target=torch.nested.nested_tensor([Y], layout=torch.jagged)),
        DtypeError,
        ("target is one dense tensor", "nested", "torch.cat"),
    ),
    "nested labels": (
        lambda: tw.supcon_loss(A, torch.nested.nested_tensor([Y], layout=torch.jagged)),
        DtypeError,
        ("labels is one dense tensor", "nested", "torch.cat"),
    ),
    "sparse labels": (
        lambda: tw.supcon_loss(A, Y.to_sparse()),
        DtypeError,
        ("labels is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
    ),
    "sparse target": (
        lambda: cross_entropy(target=Y.to_sparse()),
        DtypeError,
        ("target is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
    ),
    "sparse scale": (
        lambda: tw.clip_loss(A, B, torch.ones(1).to_sparse()),
        DtypeError,
        ("logit_scale is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
    ),
    "sparse mask": (
        lambda: tw.info_nce(A, B, A, negative_mask=(Y > 2).to_sparse()),
        DtypeError,
        ("negative_mask is a dense tensor", "sparse_coo", r"\.to_dense\(\)"),
    ),
    "fake features": (
        lambda: tw.clip_loss(FAKE, FAKE, 1.0),
        DtypeError,
        ("image_features holds values", "fake tensor", "inside of its mode"),
    ),
    "fake target": (
        lambda: cross_entropy(target=FAKE[:, 0].long()),
        DtypeError,
        ("target holds values", "fake tensor", "inside of its mode"),
    ),
    "fake scale": (
        lambda: tw.clip_loss(A, B, FAKE[0, 0]),
        DtypeError,
        ("logit_scale holds values", "fake tensor", "inside of its mode"),
    ),
    "target list": (
        lambda: cross_entropy(target=Y.tolist()),
        DtypeError,
        ("target holds class indices", "list", "dense loss"),
    ),
    "target short": (
        lambda: cross_entropy(target=Y[:5]),
        ShapeError,
        (r"one entry for each hidden state, \(6,\)", r"\(5,\)", "shift=1"),
    ),
    "target elsewhere": (
        lambda: cross_entropy(target=Y.to("meta")),
        DeviceError,
        ("target and input", "meta and cpu", "Move"),
    ),
    "hidden list": (lambda: cross_entropy(A.tolist()), DtypeError, ("input is a tensor", "list", "as_tensor")),
    "hidden number": (
        lambda: cross_entropy(torch.tensor(1.0)),
        ShapeError,
        (r"input must be \(\.\.\., features\)", r"\(\)", "Add"),
    ),
    "no tokens to shift": (
        lambda: cross_entropy(A[0], B, torch.tensor(1), shift=1),
        ShapeError,
        ("tokens, features", r"\(4,\)", "Add|yourself"),
    ),
    "classifier width": (
        lambda: cross_entropy(classifier=B[:, :2]),
        ShapeError,
        ("same number of features", r"\(6, 2\)", "classifier of another model"),
    ),
    "bias length": (
        lambda: cross_entropy(linear_bias=A[0]),
        ShapeError,
        ("linear_bias has one entry for each of 6", r"\(4,\)", "Reshape"),
    ),
    "bias integers": (
        lambda: tw.linear_logsumexp(A, B, bias=Y),
        DtypeError,
        ("bias holds floating", "int64", r"\.float\(\)"),
    ),
    "bias matrix": (
        lambda: tw.linear_logsumexp(A, B, bias=A),
        ShapeError,
        ("bias must be of 1 dimension,", r"\(6, 4\)", "Reshape"),
    ),
    "bias elsewhere": (
        lambda: cross_entropy(linear_bias=AWAY[:, 0]),
        DeviceError,
        ("linear_bias", "meta and cpu", "Move"),
    ),
    "weight length": (
        lambda: cross_entropy(weight=A[0]),
        ShapeError,
        ("weight has one entry for each of 6", r"\(4,\)", "Reshape"),
    ),
    "weight learned": (
        lambda: cross_entropy(weight=WEIGHT),
        GradientError,
        ("weight is a constant", "requires grad", "detach"),
    ),
    # negatives, masks
    "negatives flat": (
        lambda: tw.info_nce(A, B, A[0]),
        ShapeError,
        (r"negative_keys must be \(M, d\)", r"\(4,\)", "Reshape"),
    ),
    "negatives list": (
        lambda: tw.info_nce(A, B, A.tolist()),
        ShapeError,
        (r"negative_keys must be \(M, d\)", "list", "Reshape"),
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
    ),
    "mask numbers": (
        lambda: tw.info_nce(A, B, A, negative_mask=Y),
        DtypeError,
        ("negative_mask is a bool tensor", "int64", r"\.bool\(\)"),
    ),
    "mask list": (
        lambda: tw.info_nce(A, B, A, negative_mask=[True] * 6),
        DtypeError,
        ("negative_mask is a bool tensor", "list", r"\.bool\(\)"),
    ),
    "mask short": (
        lambda: tw.info_nce(A, B, A, negative_mask=Y[:5] > 2),
        ShapeError,
        (r"one entry for each negative, \(6,\)", r"\(5,\)", "Reshape"),
    ),
    "ids float": (
        lambda: tw.info_nce(A, B, query_ids=A[:, 0]),
        DtypeError,
        ("query_ids holds integers", "float32", r"\.long\(\)"),
    ),
    "ids length": (
        lambda: tw.info_nce(A, B, A[:2], key_ids=Y[:5]),
        ShapeError,
        (r"key_ids.* shape is \(6,\) or \(8,\)", r"\(5,\)", "repeat"),
    ),
    "nothing to tell apart": (
        lambda: tw.info_nce(A, B, in_batch=False),
        ConfigError,
        ("in_batch=False", "without negative_keys", "Pass negative_keys"),
    ),
    "symmetric alone": (
        lambda: tw.info_nce(A, B, A, in_batch=False, symmetric=True),
        ConfigError,
        ("symmetric=True", "all queries", "in_batch=True"),
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
    ),
    "hardness, a tensor": (
        lambda: tw.info_nce(A, B, hardness=torch.ones(6)),
        DtypeError,
        ("hardness is a number", "Tensor", "Pass one number"),
    ),
    "hardness_mode, unknown": (
        lambda: tw.info_nce(A, B, hardness=1.0, hardness_mode="hard"),
        ConfigError,
        ("no hardness_mode 'hard'", "choose one of", "hard_negatives"),
    ),
    "hardness of no negatives": (
        lambda: tw.info_nce(A, B, hardness=1.0, hardness_mode="hard_negatives"),
        ConfigError,
        ("needs negative_keys", "None", "in_batch_negatives"),
    ),
    "hardness of keys that are no negatives": (
        lambda: tw.info_nce(A, B, A, in_batch=False, hardness=1.0, hardness_mode="in_batch_negatives"),
        ConfigError,
        ("needs in_batch=True", "False", "hard_negatives"),
    ),
    # words and options
    "reduction": (
        lambda: tw.clip_loss(A, B, 1.0, reduction="avg"),
        ConfigError,
        ("no reduction", "avg", "none, sum, mean"),
    ),
    "reduction None": (lambda: cross_entropy(reduction=None), ConfigError, ("no reduction", "None", "none, sum, mean")),
    "options dict": (
        lambda: tw.nt_xent(A, options={}),
        DtypeError,
        ("options is a TileOptions", "dict", r"tilewise.TileOptions\("),
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
    ),
    "backend": (lambda: OPTIONS(backend="cuda"), ConfigError, ("no backend", "cuda", "auto, triton, torch")),
    "precision": (lambda: OPTIONS(precision="tf32"), ConfigError, ("no precision", "tf32", "torch, highest, high")),
    "ring gradients": (
        lambda: OPTIONS(ring_gradients="half"),
        ConfigError,
        ("no ring_gradients", "half", "choose one of"),
    ),
    "batch_invariant 1": (
        lambda: OPTIONS(batch_invariant=1),
        ConfigError,
        ("batch_invariant is True or False", "got 1", "Convert it"),
    ),
    "batch_invariant with a filter": (
        lambda: OPTIONS(batch_invariant=True, filter_tolerance=0.1),
        ConfigError,
        ("batch_invariant=True needs exact", "filter_tolerance=0.1", "Remove one"),
    ),
    "batch_invariant in one pass": (
        lambda: OPTIONS(batch_invariant=True, gradients="forward"),
        ConfigError,
        ("batch_invariant=True needs exact", 'gradients="forward"', "Remove one"),
    ),
    "batch_invariant contrastive loss": (
        lambda: tw.clip_loss(A, B, 1.0, options=OPTIONS(batch_invariant=True)),
        ConfigError,
        ("is for linear_cross_entropy", "got another loss", "batch_invariant=False"),
    ),
    "batch_invariant over a group": (
        lambda: tw.linear_logsumexp(A, B, group=SimpleNamespace(group_name="0"), options=OPTIONS(batch_invariant=True)),
        ConfigError,
        ("works in one process", "got a group", "group=None"),
    ),
    "gradients when": (lambda: OPTIONS(gradients="never"), ConfigError, ("no gradients", "never", "choose one of")),
    "workspace 0": (
        lambda: OPTIONS(workspace_mib=0),
        ConfigError,
        ("workspace_mib must be at least 1", "0", "default is 256"),
    ),
    "workspace negative": (
        lambda: OPTIONS(workspace_mib=-5),
        ConfigError,
        ("workspace_mib must be at least 1", "-5", "256"),
    ),
    "workspace half": (
        lambda: OPTIONS(workspace_mib=1.5),
        ConfigError,
        ("workspace_mib is a whole number", "1.5", "Round"),
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
    "tolerance text": (
        lambda: OPTIONS(filter_tolerance="0"),
        ConfigError,
        ('filter_tolerance is a .* or "rounding"', "'0'", "0 is exact"),
    ),
}
