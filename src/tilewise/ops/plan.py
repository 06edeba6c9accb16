"""A spec, the options and the group as one string: what an operator's schema can carry.

`torch.compile` sees operators with tensors and plain values only; the string is a constant to it. Encoding is plain
formatting, which it can trace; decoding happens inside the operator.
"""

from __future__ import annotations

import functools
from typing import cast, get_args

import torch
from torch import Tensor

from tilewise.kernels.spec import PairSpec, Positive
from tilewise.options import BackendName, GradientsIn, Precision, RingGradients, TileOptions


def encode(spec: PairSpec, options: TileOptions, group_name: str) -> str:
    """One line that `decode` reads back."""
    what = (
        f"{int(spec.row_lse)},{int(spec.col_lse)},{int(spec.softplus)},{int(spec.row_sum)},{spec.positive},"
        f"{int(spec.itself)},{int(spec.symmetric)},{float(spec.softcap)!r},{int(spec.drop_rows)},{int(spec.local_keys)},"
        f"{int(spec.same_rows)},{int(spec.row_entropy)},{int(spec.row_top)}"
    )
    how = (
        f"{options.backend},{int(options.workspace_mib)},{int(options.deterministic)},{options.precision},"
        f"{float(options.filter_tolerance)!r},{options.ring_gradients},{options.gradients}"
    )
    return f"{what};{how};{group_name}"


@functools.lru_cache(maxsize=256)
def decode(plan: str) -> tuple[PairSpec, TileOptions, str]:
    """The spec, the options and the name of the group ("" for none).

    >>> decode(encode(PairSpec(row_lse=True, softcap=30.0), TileOptions(), ""))[0].softcap
    30.0
    """
    what, how, group = plan.split(";", 2)
    row, col, soft, total, positive, itself, symmetric, cap, drop, local, same, entropy, top = what.split(",")
    backend, mib, exact, precision, tolerance, travelling, formed = how.split(",")
    assert positive in get_args(Positive)
    spec = PairSpec(
        row_lse=row == "1",
        col_lse=col == "1",
        softplus=soft == "1",
        row_sum=total == "1",
        positive=cast(Positive, positive),
        itself=itself == "1",
        symmetric=symmetric == "1",
        softcap=float(cap),
        drop_rows=drop == "1",
        local_keys=local == "1",
        same_rows=same == "1",
        row_entropy=entropy == "1",
        row_top=top == "1",
    )
    options = TileOptions(
        backend=cast(BackendName, backend),
        workspace_mib=int(mib),
        deterministic=exact == "1",
        precision=cast(Precision, precision),
        filter_tolerance=float(tolerance),
        ring_gradients=cast(RingGradients, travelling),
        gradients=cast(GradientsIn, formed),
    )
    return spec, options, group


def with_wanted(group_name: str, *inputs: Tensor | None) -> str:
    """The name of a group, and what this rank will want gradients of: ranks compare it before they begin.

    Args:
        group_name: "" for no group, and so it stays.
        inputs: the rows, the columns, the scale and the bias.
    """
    if not group_name:
        return ""
    recorded = torch.is_grad_enabled()
    return f"{group_name}?{named_inputs(*(recorded and x is not None and x.requires_grad for x in inputs))}"


def read_wanted(group_name: str) -> tuple[str, str]:
    """Undo `with_wanted`.

    >>> read_wanted(with_wanted("0", torch.ones(2, requires_grad=True), None, torch.ones(()), None))
    ('0', 'rows')
    """
    name, _, wanted = group_name.rpartition("?")
    return name, wanted


def named_inputs(*asked: bool) -> str:
    """The words for those of the four inputs that are asked for.

    >>> named_inputs(True, False, True, False)
    'rows scale'
    """
    return " ".join(name for name, on in zip(("rows", "columns", "scale", "bias"), asked, strict=True) if on)
