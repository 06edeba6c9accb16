"""The tensors of a pair, in one table. Lists of their names are made from it: for schemas, keys, programs and rings.

`tilewise.kernels.spec.Pair` says what each of them is. Axes: n rows, m columns, d features, e features of the guide, K
columns that each row picks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class TensorArgument(NamedTuple):
    """A tensor of a pair."""

    name: str
    side: Literal["row", "col", ""]  # whether it has an entry for each row or each column; "" for a number
    width: Literal["", "d", "e", "K"] = ""  # how many numbers each entry has; "" for one
    integer: bool = False  # int64
    gradient: bool = False  # differentiable


TABLE = (
    TensorArgument("a", "row", "d", gradient=True),
    TensorArgument("b", "col", "d", gradient=True),
    TensorArgument("scale", "", gradient=True),
    TensorArgument("bias", "col", gradient=True),
    TensorArgument("row_key", "row", integer=True),
    TensorArgument("col_key", "col", integer=True),
    TensorArgument("row_skip", "row", integer=True),
    TensorArgument("col_skip", "col", integer=True),
    TensorArgument("row_shift", "row"),
    TensorArgument("col_shift", "col"),
    TensorArgument("col_weight", "col"),
    TensorArgument("guide_a", "row", "e"),
    TensorArgument("guide_b", "col", "e"),
    TensorArgument("guide_scale", ""),
    TensorArgument("guide_bias", "col"),
    TensorArgument("row_limit", "row"),
    TensorArgument("row_norm", "row"),
    TensorArgument("guide_norm", "row"),
    TensorArgument("pick", "row", "K", integer=True),
    TensorArgument("row_scale", "row"),
)
LEAVES = tuple(t.name for t in TABLE if t.gradient)
KEYS = tuple(t.name for t in TABLE if not t.gradient)
FACTS = tuple(t.name for t in TABLE if t.integer and not t.width)  # what is positive, and what is excluded
FEATURES = tuple(t.name for t in TABLE if t.width in ("d", "e"))
SINGLE = tuple(t.name for t in TABLE if not t.side)
WEIGHTS = ("each", "square")  # of `RowWeights`
ROW_VECTORS = tuple(t.name for t in TABLE if t.side == "row" and not t.width)
COL_VECTORS = tuple(t.name for t in TABLE if t.side == "col" and not t.width)
# All that belong to rows or to columns, other than the features of the pair
ROW_TENSORS = tuple(t.name for t in TABLE if t.side == "row" and t.width != "d")
COL_TENSORS = tuple(t.name for t in TABLE if t.side == "col" and t.width != "d")
