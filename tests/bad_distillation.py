"""Bad inputs of distillation and of guides: see `tests.bad_inputs`."""

from types import SimpleNamespace

import torch
from tests import oracles
from tests.bad_inputs import A, B, Y, ce

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError

# A teacher of another width
T, W = (torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))


def distil(hidden=A, classifier=B, teacher=T, head=W, **settings):
    return tw.linear_distillation_loss(hidden, classifier, teacher, head, **settings)


def clip(teacher_image=T, teacher_text=W, **settings):
    return tw.clip_distillation_loss(A, B, 1.0, teacher_image, teacher_text, 1.0, **settings)


def guided(negatives=None, **guide):
    return tw.info_nce(A, B, negatives, guide=tw.Guide(**{"query": T, "key": W} | guide))


PADDED = torch.cat([W, torch.ones(2, 3)])


def dense(mask=None):
    """The divergence, a mean over the tokens that count."""
    each = oracles.distillation_dense(A.double() @ B.double().T, T.double() @ W.double().T, 0)
    return each.mean() if mask is None else each[mask].mean()


def clip_dense():
    student, teacher = A.double() @ B.double().T, T.double() @ W.double().T
    both = [oracles.distillation_dense(x, y, 0) for x, y in ((student, teacher), (student.T, teacher.T))]
    return torch.stack(both).mean()


def guided_dense(negatives=None):
    query, key = T.double(), W.double()
    scores, limit = query @ key.T, (query * key).sum(1) * (1 + 1e-9)
    eye = torch.eye(6, dtype=torch.bool)
    # A key is left out for the queries to which the guide finds it closer than their own key.
    left_out = (scores > limit[:, None]) & ~eye, None, None
    more = None
    if negatives is not None:
        more, left_out = negatives.double(), (*left_out[:2], query @ T.double().T > limit[:, None])
    return oracles.info_nce_dense(A.double(), B.double(), more, left_out=(left_out[0], left_out[0].T, left_out[2]))


BAD = {
    "beta": (lambda: distil(beta=2.0), RangeError, (r"beta is in \[0, 1\]", "2.0", "0.5 is the Jensen-Shannon")),
    "distilling temperature": (
        lambda: distil(temperature=0.0),
        RangeError,
        ("temperature is positive", "0.0", "logits"),
    ),
    "another number of tokens": (
        lambda: distil(teacher=T[:5]),
        ShapeError,
        (r"one hidden state for each of the student's, \(6,\)", r"\(5, 3\)", "same tokens"),
        lambda: (distil(teacher=T), dense()),
    ),
    "a teacher's head of another width": (
        lambda: distil(head=torch.ones(6, 4)),
        ShapeError,
        (
            "teacher_input and teacher_weight need the same number of features",
            r"\(6, 4\)",
            "classifier of another model",
        ),
    ),
    "a teacher's soft cap": (
        lambda: distil(teacher_softcap=-1.0),
        RangeError,
        ("teacher_softcap is a positive number", "-1.0", "pass None or 0"),
        lambda: (distil(teacher_softcap=None), dense()),
    ),
    "another number of classes": (
        lambda: distil(head=PADDED),
        ShapeError,
        ("both classifiers need the same classes", r"6 \(student\) and 8 \(teacher\)", "pass classes="),
        lambda: (distil(head=PADDED, classes=6), dense()),
    ),
    "more classes than rows": (
        lambda: distil(head=PADDED, classes=7),
        RangeError,
        ("at most the rows of both classifiers, 6", "got 7", r"Pass the size of the tokenizer, len\(tokenizer\)"),
        lambda: (distil(head=PADDED, classes=6), dense()),
    ),
    "another shard of the teacher over a group": (
        lambda: tw.linear_distillation_stats(A, B, T, PADDED, group=SimpleNamespace(group_name="0")),
        ShapeError,
        ("over a group both classifiers are sharded over the same classes", r"6 \(student\)", "pass DTensors"),
        lambda: (distil(head=PADDED[:6]), dense()),
    ),
    "classes over a group": (
        lambda: tw.linear_distillation_stats(A, B, T, PADDED, classes=6, group=SimpleNamespace(group_name="0")),
        ConfigError,
        ("classes= is for whole classifiers", "group= shards them", r"linear_weight\[:k\] and teacher_weight\[:k\]"),
        lambda: (distil(head=PADDED[:6]), dense()),
    ),
    "classes of text": (
        lambda: distil(classes="6"),
        DtypeError,
        ("classes is a whole number", "str", "tokenizer"),
        lambda: (distil(classes=6), dense()),
    ),
    "a teacher of another type": (
        lambda: distil(teacher=T.double(), head=W.double()),
        DtypeError,
        (
            "teacher_input and input need the same type",
            "float64",
            r"Convert both tensors of the teacher with \.to\(\)$",
        ),
        lambda: (distil(teacher=T.double().to(A.dtype), head=W.double().to(A.dtype)), dense()),
    ),
    "a mask of integers": (
        lambda: distil(mask=Y),
        DtypeError,
        ("mask is a bool tensor", "int64", r"\.bool\(\)"),
        lambda: (distil(mask=Y.bool()), dense(Y > 0)),
    ),
    "a mask of another shape": (
        lambda: distil(mask=torch.ones(5, dtype=torch.bool)),
        ShapeError,
        (r"mask has one entry for each hidden state, \(6,\)", r"\(5,\)", "filter drop"),
    ),
    "a mask with one more axis": (
        lambda: distil(mask=Y[:, None] > 2),
        ShapeError,
        (r"mask has one entry for each hidden state, \(6,\)", r"\(6, 1\)", "Reshape it"),
        lambda: (distil(mask=(Y[:, None] > 2).reshape(6)), dense(Y > 2)),
    ),
    "a weight of targets": (
        lambda: distil(target_weight="half"),
        DtypeError,
        ("target_weight is a number", "str", "Pass a number"),
        lambda: (distil(target=Y, target_weight=0.5), dense() + 0.5 * ce()),
    ),
    "another number of teacher's pairs": (
        lambda: clip(T[:5], W[:5]),
        ShapeError,
        ("same number of rows", r"\(5, 3\)", "drop samples"),
    ),
    "a CLIP teacher of another type": (
        lambda: clip(T.double(), W.double()),
        DtypeError,
        ("need the same type", "float64", r"Convert both tensors of the teacher with \.to\(\)$"),
        lambda: (clip(T.double().to(A.dtype), W.double().to(A.dtype)), clip_dense()),
    ),
    "a guide that is none": (
        lambda: tw.info_nce(A, B, guide=A),
        ConfigError,
        ("guide is a tilewise.Guide", "Tensor", r"tilewise.Guide\("),
        lambda: (guided(), guided_dense()),
    ),
    "a margin strategy": (
        lambda: guided(margin_strategy="both"),
        ConfigError,
        ("no margin_strategy", "both", "absolute, relative"),
        lambda: (guided(margin_strategy="absolute"), guided_dense()),
    ),
    "a relative margin": (
        lambda: guided(margin=2.0, margin_strategy="relative"),
        RangeError,
        (r"relative margin is in \[0, 1\]", "2.0", "share"),
    ),
    "a guide without negatives": (
        lambda: guided(negatives=A),
        ConfigError,
        ("the loss has negative_keys", "the guide has none", "Pass both"),
        lambda: (guided(negatives=A, negative_keys=T), guided_dense(A)),
    ),
    "a guide with negatives": (
        lambda: guided(negative_keys=T),
        ConfigError,
        ("the guide has negative_keys", "the loss has none", "Pass both"),
        lambda: (guided(), guided_dense()),
    ),
    "a guide of fewer negatives": (
        lambda: guided(negatives=A, negative_keys=T[:5]),
        ShapeError,
        (r"one embedding for each negative, \(6,\)", r"\(5,\)", "same negatives"),
        lambda: (guided(negatives=A, negative_keys=T), guided_dense(A)),
    ),
    "a guide of another type": (
        lambda: guided(query=T.double(), key=W.double()),
        DtypeError,
        ("need the same type", "float64", "Convert"),
        lambda: (guided(query=T.double().to(A.dtype), key=W.double().to(A.dtype)), guided_dense()),
    ),
}
