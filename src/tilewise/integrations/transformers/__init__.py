"""A causal-LM loss that never computes the logits, for any model of `transformers` with an output embedding.

    from tilewise.integrations.transformers import use_linear_cross_entropy
    handle = use_linear_cross_entropy(model)      # this instance only; handle.remove() undoes it

In training, the head returns `LazyLogits`: its input and weight instead of their product. The model's own forward
scales and caps them, and the model's own loss function calls ``F.cross_entropy`` on them. This call becomes
`tilewise.linear_cross_entropy`. So the shift of the labels, ``num_items_in_batch``, auxiliary losses, scales and caps
are those of the model. Any other operation on the logits raises an error and never gives a wrong loss.

Axes: n tokens, d features, v classes (the vocabulary).
"""

from tilewise.integrations.transformers.handle import LossHandle, use_linear_cross_entropy
from tilewise.integrations.transformers.head_input import HeadInput
from tilewise.integrations.transformers.lazy_logits import LazyLogits, LossSettings, Term
from tilewise.integrations.transformers.no_logits import NO_LOGITS, LazyLogitsError, NoLogits

__all__ = [
    "NO_LOGITS",
    "HeadInput",
    "LazyLogits",
    "LazyLogitsError",
    "LossHandle",
    "LossSettings",
    "NoLogits",
    "Term",
    "use_linear_cross_entropy",
]
