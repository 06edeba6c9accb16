"""Arguments of the public functions: checked once, at the door, with words that help.

Checks of values (targets, temperatures) read them on the host, so they happen for CPU tensors outside of
`torch.compile` only. On a GPU, or compiled, a value out of range gives NaN, never a plausible number.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewise.errors import ConfigError, DeviceError, DtypeError, GroupError, RangeError, ShapeError
from tilewise.options import DEFAULT_OPTIONS, TileOptions

Reduction = Literal["none", "sum", "mean"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Asking torch which of them it knows stops torch.compile in torch 2.11.
AUTOCAST_DEVICES = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


def check_reduction(reduction: str) -> None:
    """One of the three words."""
    if reduction not in get_args(Reduction):
        raise ConfigError(f"no reduction {reduction!r}; choose one of {', '.join(get_args(Reduction))}")


def check_options(options: TileOptions | None) -> TileOptions:
    """The options, or the default ones."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, TileOptions):
        raise DtypeError(f"options is a TileOptions, got {type(options).__name__}: use tilewise.TileOptions(...)")
    return options


def group_name(group: Any) -> str:
    """Name of a process group, by which an operator finds it. "" for None, which means this process only."""
    if group is None:
        return ""
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        how = "For all ranks, pass torch.distributed.group.WORLD"
        if hasattr(group, "get_group"):
            how = "Pass its .get_group()"
        elif group == -100:  # torch's answer of new_group on the ranks outside
            how = "new_group returns this on ranks outside of the group. Call the loss only on its members"
        raise DtypeError(
            f"group is a torch.distributed process group or None, got {type(group).__name__} {group!r}. {how}"
        )
    if not torch.compiler.is_compiling() and _is_stale(group, name):
        raise GroupError(
            f"the process group {name!r} is from before torch.distributed was initialized again, and another group has "
            "its name now. Get the handle after init_process_group: pass torch.distributed.group.WORLD, or call "
            "new_group again"
        )
    return name


def _is_stale(group: Any, name: str) -> bool:
    """Whether `torch.distributed` knows another group by this name. Names start again after destroy_process_group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if not isinstance(group, torch.distributed.ProcessGroup):
        return False
    try:
        registered = torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # destroyed: the operator reports it
        return False
    return registered is not group


def check_features(name: str, features: Tensor, dims: int = 2) -> Tensor:
    """A floating tensor of that many dimensions, in autocast's type where autocast is on."""
    check_floating(name, features, dims)
    return autocast(features)


def check_floating(name: str, features: Tensor, dims: int) -> None:
    """A floating tensor of that many dimensions."""
    if not isinstance(features, Tensor):
        raise DtypeError(f"{name} is a tensor, got {type(features).__name__}. {tensor_of(features)}")
    if features.layout is not torch.strided:
        raise DtypeError(f"{name} is a dense tensor, got {features.layout}. Convert it with .to_dense()")
    if not torch.compiler.is_compiling() and hasattr(features, "device_mesh"):
        raise DtypeError(
            f"{name} is a plain tensor, got a {type(features).__name__}, of which this rank holds a part. Call the "
            "loss inside of the forward of the module that FSDP has wrapped, where its weights are whole"
        )
    if features.dtype not in FLOATS:
        raise DtypeError(
            f"{name} holds floating numbers (float16, bfloat16, float32 or float64), got {features.dtype}. "
            "Convert it with .float()"
        )
    if features.dim() != dims:
        shape = "(rows, features)" if dims == 2 else f"of {dims} dimension{'s' * (dims != 1)}"
        how = ".flatten(0, -2)" if features.dim() > dims else ".unsqueeze(0)"
        raise ShapeError(f"{name} must be {shape}, got {tuple(features.shape)}. Reshape it, for instance with {how}")
    check_has_float64(name, features)


def check_has_float64(name: str, features: Tensor) -> None:
    """A device on which vectors can be float64, whatever type the features have."""
    if features.device.type == "mps":
        raise DeviceError(
            f"{name} must be on a device that has float64, in which sums of scores are kept, got {features.device}. "
            "Pass .cpu() of all tensors; gradients find their way back"
        )


def tensor_of(value: Any) -> str:
    """How to get the tensor that was wanted out of what came."""
    if isinstance(value, torch.nn.Module):
        return "Pass its .weight" if hasattr(value, "weight") else "Pass what it returns"
    return "Convert it with torch.as_tensor()"


def autocast(features: Tensor) -> Tensor:
    """The features in the type of the active autocast region; float64 stays, as autocast leaves it."""
    kind = features.device.type
    if features.dtype == torch.float64 or kind not in AUTOCAST_DEVICES:
        return features
    if torch.is_autocast_enabled(kind):
        return features.to(torch.get_autocast_dtype(kind))
    return features


def check_together(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Same width, type and device."""
    first, second = names
    if a.shape[-1] != b.shape[-1]:
        turned = b.dim() == 2 and a.shape[-1] == b.shape[0]
        raise ShapeError(
            f"{first} and {second} need the same number of features, got {tuple(a.shape)} and {tuple(b.shape)}. "
            + (f"Pass {second}.T, if it is transposed" if turned else "Did one encoder skip its projection head?")
        )
    check_device(names, a, b)
    if a.dtype != b.dtype:
        raise DtypeError(
            f"{first} and {second} need the same type, got {a.dtype} and {b.dtype}. "
            "Convert one of them, or run under torch.autocast"
        )


def check_device(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Same device."""
    if a.device != b.device:
        raise DeviceError(f"{names[0]} and {names[1]} need one device, got {a.device} and {b.device}. Move one of them")


def check_same_rows(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Row i of one belongs to row i of the other."""
    if a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"row i of {names[0]} belongs to row i of {names[1]}, so both need the same number of rows, "
            f"got {tuple(a.shape)} and {tuple(b.shape)}. Did a filter drop samples on one side only?"
        )


def check_ids(name: str, ids: Tensor, sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Integer ids, one for each row, as int64 on the device of the features."""
    if not isinstance(ids, Tensor):
        raise DtypeError(f"{name} is a tensor of integers, got {type(ids).__name__}. Use torch.as_tensor()")
    if ids.dtype not in INTEGERS and ids.dtype != torch.bool:
        raise DtypeError(f"{name} holds integers, got {ids.dtype}. Convert it with .long()")
    if ids.dim() != 1 or ids.shape[0] not in sizes:
        wanted = " or ".join(f"({size},)" for size in dict.fromkeys(sizes))
        how = "Flatten it" if ids.numel() in sizes else "Views of one sample repeat its entry"
        raise ShapeError(f"{name} has one entry for each row, so its shape is {wanted}, got {tuple(ids.shape)}. {how}")
    check_device((name, "the features"), ids, like)
    return ids.long()


def check_scalar(name: str, value: float | Tensor, like: Tensor, *, positive: bool = False) -> Tensor:
    """A number or a tensor of one element, as a 0-d tensor on the device of the features."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ShapeError(
                f"{name} is one number, got a tensor of shape {tuple(value.shape)}. "
                "Multiply the features by it if every row has its own"
            )
        if not value.dtype.is_floating_point:
            raise DtypeError(f"{name} is a floating number, got {value.dtype}. Convert it with .float()")
        if value.device != like.device:
            if value.device.type != "cpu":
                check_device((name, "the features"), value, like)
            value = value.to(like.device)
        if can_read(value) and not torch.isfinite(value).all():
            raise RangeError(f"{name} must be finite, got {value.item()}. Did a step with a large gradient spoil it?")
        if positive and can_read(value) and not value.item() > 0:
            raise RangeError(f"{name} must be positive, got {value.item()}. Is it a logarithm? Then pass its .exp()")
        return value if value.dim() == 0 else value.reshape(())  # a view is a step of the graph
    check_number(name, value, positive=positive)
    stat = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), value, dtype=stat, device=like.device)


def check_temperature(value: float | Tensor, like: Tensor) -> Tensor:
    """What scores are multiplied by where they are divided by a temperature: 1 / value, a 0-d tensor.

    The division is made in the type of the statistics: half a type's digits, or float32's beside float64 features,
    would be a temperature of its own.
    """
    number = check_scalar("temperature", value, like, positive=True)
    if number.dtype != torch.float64:
        number = number.to(torch.float64 if like.dtype == torch.float64 else torch.float32)
    if isinstance(value, Tensor) and not can_read(number):
        number = torch.where(number > 0, number, torch.nan)  # nobody looked
    return number.reciprocal()


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """A finite Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{name} is a number, got {type(value).__name__}. Convert it with float()")
    if positive and not value > 0:
        raise RangeError(f"{name} must be positive, got {value}. Is it a logarithm? Then pass math.exp() of it")
    if not -float("inf") < value < float("inf"):
        raise RangeError(f"{name} must be finite, got {value}. Check what it was computed from")


def can_read(values: Tensor) -> bool:
    """Whether values may be looked at here without waiting for a device or breaking a graph."""
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return False
    return type(values) in (Tensor, torch.nn.Parameter) or not is_fake(values)
