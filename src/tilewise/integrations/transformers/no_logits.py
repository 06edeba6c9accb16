"""The placeholder for logits in the output of a model that computed its loss without them."""

from __future__ import annotations

from typing import Any

from tilewise.errors import ConfigError


class LazyLogitsError(ConfigError, AttributeError):
    """An operation that needs the logits. Also an ``AttributeError``, so that ``hasattr`` returns False."""


class NoLogits:
    """The logits in the output of a model that computed its loss without them. Any use raises `LazyLogitsError`."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LazyLogitsError(
            "the logits of this output were not computed: use_linear_cross_entropy computes the loss without them when "
            "the model gets labels in training (with evaluation=True also in evaluation mode). For log-probabilities, "
            "entropy and accuracy use statistics=True and handle.token_stats. For logits call the model in evaluation "
            "mode or without labels, or call handle.remove()"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every torch function."""
        return NO_LOGITS._refuse()

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return "NoLogits(not computed, see use_linear_cross_entropy)"

    def __reduce__(self) -> str:
        return "NO_LOGITS"  # copies and pickles are this object


NO_LOGITS = NoLogits()
