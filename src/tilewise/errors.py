"""What can go wrong, as types. Every message says what was wanted, what came, and what to do.

Each error is also the built-in that a Python user expects, so ``except ValueError`` keeps working.
"""


class TilewiseError(Exception):
    """Anything that tilewise refuses."""


class ShapeError(TilewiseError, ValueError):
    """Tensors whose shapes do not fit together."""


class DtypeError(TilewiseError, TypeError):
    """A tensor or argument of the wrong type."""


class DeviceError(TilewiseError, ValueError):
    """Tensors that live on different devices."""


class RangeError(TilewiseError, ValueError):
    """A number, label or target outside its range."""


class ConfigError(TilewiseError, ValueError):
    """An option or setting that does not exist or contradicts another."""


class BackendError(TilewiseError, ValueError):
    """A backend that is unknown or cannot serve this call."""


class GroupError(TilewiseError, RuntimeError):
    """Ranks of a process group that disagree, or a rank that is gone."""


class GradientError(TilewiseError, RuntimeError):
    """A derivative that is not available, such as the second one."""


class DataError(TilewiseError, ValueError):
    """A data set, record or file that cannot be used."""


class CheckpointError(TilewiseError, RuntimeError):
    """A checkpoint that is missing, damaged, or does not fit this run."""
