"""Pairs of images and captions: sources, their order, and the batches made from them."""

from tilewise.train.data.batches import Batch, BatchStream
from tilewise.train.data.open import EvalPairs, Watch, open_eval_pairs, open_source
from tilewise.train.data.order import Order, Position
from tilewise.train.data.records import Record, SkipLog, Source

__all__ = [
    "Batch", "BatchStream", "EvalPairs", "Order", "Position", "Record", "SkipLog", "Source", "Watch", "open_eval_pairs",
    "open_source",
]  # fmt: skip
