"""Bad inputs of distillation and of guides: see `tests.bad_inputs`."""

import torch
from tests.bad_inputs import A, B, Y

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError

T, W = torch.ones(6, 3), torch.ones(6, 3)  # a teacher of another width


def distil(hidden=A, classifier=B, teacher=T, head=W, **settings):
    return tw.linear_distillation_loss(hidden, classifier, teacher, head, **settings)


def clip(teacher_image=T, teacher_text=W, **settings):
    return tw.clip_distillation_loss(A, B, 1.0, teacher_image, teacher_text, 1.0, **settings)


def guided(negatives=None, **guide):
    return tw.info_nce(A, B, negatives, guide=tw.Guide(**{"query": T, "key": W} | guide))


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
    ),
    "another number of classes": (
        lambda: distil(head=torch.ones(8, 3)),
        ShapeError,
        ("both classifiers need the same classes", r"6 \(student\) and 8 \(teacher\)", "pass classes="),
    ),
    "more classes than rows": (
        lambda: distil(head=torch.ones(8, 3), classes=7),
        RangeError,
        ("at most the rows of both classifiers", "6", "got 7"),
    ),
    "classes of text": (lambda: distil(classes="6"), DtypeError, ("classes is a whole number", "str", "tokenizer")),
    "a teacher of another type": (
        lambda: distil(teacher=T.double(), head=W.double()),
        DtypeError,
        ("teacher_input and input need the same type", "float64", "autocast"),
    ),
    "a mask of integers": (
        lambda: distil(mask=Y),
        DtypeError,
        ("mask is a bool tensor", "int64", r"\.bool\(\)"),
    ),
    "a mask of another shape": (
        lambda: distil(mask=torch.ones(5, dtype=torch.bool)),
        ShapeError,
        (r"mask has one entry for each hidden state, \(6,\)", r"\(5,\)", "Reshape"),
    ),
    "a weight of targets": (
        lambda: distil(target_weight="half"),
        DtypeError,
        ("target_weight is a number", "str", "Pass a number, such as 1"),
    ),
    "another number of teacher's pairs": (
        lambda: clip(T[:5], W[:5]),
        ShapeError,
        ("same number of rows", r"\(5, 3\)", "drop samples"),
    ),
    "a CLIP teacher of another type": (
        lambda: clip(T.double(), W.double()),
        DtypeError,
        ("need the same type", "float64", "autocast"),
    ),
    "a guide that is none": (
        lambda: tw.info_nce(A, B, guide=A),
        ConfigError,
        ("guide is a tilewise.Guide", "Tensor", r"tilewise.Guide\("),
    ),
    "a margin strategy": (
        lambda: guided(margin_strategy="both"),
        ConfigError,
        ("no margin_strategy", "both", "absolute, relative"),
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
    ),
    "a guide with negatives": (
        lambda: guided(negative_keys=T),
        ConfigError,
        ("the guide has negative_keys", "the loss has none", "Pass both"),
    ),
    "a guide of fewer negatives": (
        lambda: guided(negatives=A, negative_keys=T[:5]),
        ShapeError,
        (r"one embedding for each negative, \(6,\)", r"\(5,\)", "same negatives"),
    ),
    "a guide of another type": (
        lambda: guided(query=T.double(), key=W.double()),
        DtypeError,
        ("need the same type", "float64", "Convert"),
    ),
}
