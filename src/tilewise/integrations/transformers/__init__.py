"""A causal-LM loss that never builds the logits, for any model of `transformers` with an output embedding.

    from tilewise.integrations.transformers import use_linear_cross_entropy
    handle = use_linear_cross_entropy(model)      # this instance only; handle.remove() undoes it

In training the head returns `UnbuiltLogits`: what it would have multiplied, not the product. The model's own forward
then scales and caps it and its own loss function asks for ``F.cross_entropy`` of it, and that is the moment at which
`tilewise.linear_cross_entropy` is called. So the shift, ``num_items_in_batch``, auxiliary losses, scales and caps are
the model's and not a copy of them, and whatever else a model does to its logits is an error, never a wrong loss.

Axes: n tokens, d features, v classes (the vocabulary).
"""

from tilewise.integrations.transformers.handle import LossHandle, use_linear_cross_entropy
from tilewise.integrations.transformers.head_input import HeadInput
from tilewise.integrations.transformers.unbuilt import LossSettings, Term, UnbuiltLogits, UnbuiltLogitsError

__all__ = [
    "HeadInput",
    "LossHandle",
    "LossSettings",
    "Term",
    "UnbuiltLogits",
    "UnbuiltLogitsError",
    "use_linear_cross_entropy",
]
