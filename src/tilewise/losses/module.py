"""What the Modules of the losses share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class LossModule(nn.Module):
    """A loss as a Module that stores some of its arguments. `forward` takes the others, as the function does.

    A subclass names the function, and its ``__init__`` takes the arguments that are stored and passes ``locals()`` on.
    Those in ``attributes`` become attributes: an nn.Parameter among them is then learned.
    """

    function: ClassVar[Callable[..., Any]]
    attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        for name in self.attributes:
            setattr(self, name, given[name])
        self.settings = settings_of(given, *self.attributes)

    def __init_subclass__(cls, **more: Any) -> None:
        """Give the class a `forward` whose signature has the arguments that are not stored."""
        super().__init_subclass__(**more)
        stored, parameters = inspect.signature(cls).parameters, inspect.signature(cls.function).parameters
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = [parameter for name, parameter in parameters.items() if name not in stored]

        def forward(self: LossModule, *args: Any, **kwargs: Any) -> Any:
            attributes = {name: getattr(self, name) for name in self.attributes}
            return self.function(*args, **kwargs, **attributes, **self.settings)

        result = inspect.signature(cls.function).return_annotation
        forward.__signature__ = inspect.Signature([own, *others], return_annotation=result)  # type: ignore[attr-defined]
        forward.__doc__ = f"See `{cls.function.__name__}`."
        cls.forward = forward


def settings_of(given: dict[str, Any], *attributes: str) -> dict[str, Any]:
    """The arguments of a Module, from ``locals()`` in its ``__init__``, except those that become ``attributes``."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__", *attributes)}
