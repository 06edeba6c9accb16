"""Exceptions of tilewise. Every message says what was expected, what was passed, and what to do.

Each type is also the built-in exception that a Python user expects, so ``except ValueError`` works.
"""


class TilewiseError(Exception):
    """Base class of all errors that tilewise raises."""


class ShapeError(TilewiseError, ValueError):
    """Tensors whose shapes do not fit together."""


class DtypeError(TilewiseError, TypeError):
    """A tensor or argument of the wrong type."""


class DeviceError(TilewiseError, ValueError):
    """Tensors on different devices, or on a device that is not supported."""


class RangeError(TilewiseError, ValueError):
    """A number, label or target outside its range."""


class ConfigError(TilewiseError, ValueError):
    """An option or setting that does not exist or contradicts another."""


class BackendError(TilewiseError, ValueError):
    """A backend that is unknown or cannot serve this call."""


class GroupError(TilewiseError, RuntimeError):
    """Ranks of a process group whose arguments differ, or a rank that no longer responds."""


class GradientError(TilewiseError, RuntimeError):
    """A derivative that is not available, such as a second derivative."""


class DataError(TilewiseError, ValueError):
    """A data set, record or file that cannot be used."""


class CheckpointError(TilewiseError, RuntimeError):
    """A checkpoint that is missing, damaged, or does not fit this run."""
