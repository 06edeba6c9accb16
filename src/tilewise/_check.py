"""Checks of the arguments of public functions. Each message says what is expected, what was passed, what to do.

Checks of values (targets, temperatures) read them on the host. They run only for CPU tensors outside of
`torch.compile`. On a GPU, or in a compiled graph, a value out of range gives NaN, never a plausible number.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewise.errors import ConfigError, DeviceError, DtypeError, GradientError, GroupError, RangeError, ShapeError
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_choice

Reduction = Literal["none", "sum", "mean"]
REDUCTIONS = get_args(Reduction)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LARGEST_SCALE = 1e30  # a number between this and its negative is accepted without further checks
PLAIN = (Tensor, torch.nn.Parameter)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
# Computed at import: torch.compile cannot trace is_autocast_available in torch 2.11.
AUTOCAST_DEVICES = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


def check_reduction(reduction: str) -> None:
    """Check that the reduction is "none", "sum" or "mean"."""
    if type(reduction) is not str or reduction not in REDUCTIONS:
        check_choice("reduction", reduction, REDUCTIONS)


def check_options(options: TileOptions | None, *, rows_alone: bool = False) -> TileOptions:
    """The options, or the defaults for None. ``rows_alone``: a row's result does not depend on the other rows."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, TileOptions):
        raise DtypeError(f"options is a TileOptions, got {type(options).__name__}. Use tilewise.TileOptions(...)")
    if options.batch_invariant and not rows_alone:
        raise ConfigError(
            "batch_invariant=True is for linear_cross_entropy, linear_token_stats and linear_logsumexp, in which a row "
            "does not depend on the other rows, got another loss. Pass batch_invariant=False to it"
        )
    return options


def check_row_options(options: TileOptions | None, group: Any, *, shards: bool = True) -> tuple[TileOptions, str]:
    """The options and the name of the group, for a loss in which a row does not depend on the other rows.

    ``shards``: whether the group may mean shards of the columns beside equal rows, which keep batch invariance.
    """
    options, name = check_options(options, rows_alone=True), group_name(group)
    if options.batch_invariant and name and not shards:
        raise ConfigError(
            "batch_invariant=True works in one process, or over a group whose ranks have all rows, got a group whose "
            "ranks have different rows. Pass group=None, or batch_invariant=False"
        )
    return options, name


def group_name(group: Any) -> str:
    """The name by which an operator looks up a process group; "" for None, which means this process only."""
    if group is None:
        return ""
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        how = "For all ranks, pass torch.distributed.group.WORLD"
        if hasattr(group, "get_group"):
            how = "Pass its .get_group()"
        elif type(group) is int and group == -100:  # the value that new_group returns on ranks outside of the group
            how = "new_group returns this on ranks outside of the group. Call the loss only on its members"
        raise DtypeError(
            f"group is a torch.distributed process group or None, got {type(group).__name__} {group!r:.60}. {how}"
        )
    if not torch.compiler.is_compiling() and _is_stale(group, name):
        raise GroupError(
            f"the process group {name!r} is from before torch.distributed was initialized again, and another group has "
            "its name now. Get the handle after init_process_group: pass torch.distributed.group.WORLD, or call "
            "new_group again"
        )
    return name


def _is_stale(group: Any, name: str) -> bool:
    """Whether another group is registered under this name. Names are reused after destroy_process_group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    if not isinstance(group, torch.distributed.ProcessGroup):
        return False
    try:
        registered = torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # destroyed; the operator raises the error
        return False
    return registered is not group


def check_features(name: str, features: Tensor, dims: int = 2) -> Tensor:
    """Check a floating tensor of ``dims`` dimensions. Returns it, converted to autocast's type if autocast is on."""
    real_part = f"Pass torch.view_as_real({name}).flatten(-2), whose products are the real parts of a @ b.conj().T"
    check_floating(name, features, dims, real_part)
    return autocast(features)


def check_tensor(name: str, value: Any, kind: str = "a tensor") -> None:
    """Check that an argument is a plain tensor. ``kind`` names what is expected in the message."""
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name} is {kind}, got {type(value).__name__}. {tensor_of(value)}")
    if value.is_nested:
        raise DtypeError(
            f"{name} is one dense tensor, got a nested one. Pass torch.cat(list({name}.unbind())), which stacks the "
            "rows of all parts, or pad it and mark the padding"
        )
    if value.layout is not torch.strided:
        raise DtypeError(f"{name} is a dense tensor, got {value.layout}. Convert it with .to_dense()")
    if type(value) in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return
    if hasattr(value, "device_mesh"):
        raise DtypeError(
            f"{name} is a plain tensor where the first arguments are, got a {type(value).__name__}, of which this rank "
            f"holds one shard. {_unsharded(name, value)}"
        )
    if is_fake(value) and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        raise DtypeError(
            f"{name} holds values, got a fake tensor, and no FakeTensorMode is active. Call the loss inside of its "
            "mode (with mode: ...), or pass a real tensor"
        )


def _unsharded(name: str, shard: Tensor) -> str:
    """Advice for a DTensor. The gradient of full_tensor() would be that of this rank alone, without an error."""
    if not (shard.requires_grad and torch.is_grad_enabled()):
        return f"Pass {name}.full_tensor()"
    return "Make the first arguments DTensors too, with DTensor.from_local(..., mesh, placements)"


def tensor_of(value: Any) -> str:
    """Advice on how to get a tensor from ``value``."""
    if isinstance(value, torch.nn.Module):
        return "Pass its .weight" if hasattr(value, "weight") else "Pass its output"
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of a NumPy array or a pandas column
    if isinstance(value, list | tuple) or kind == "O":
        named = any(isinstance(item, str | bytes) for item in value)
    else:
        named = kind in ("U", "S", "T")
    if named:
        return (
            "Number the strings: number = {name: i for i, name in enumerate(sorted(set(names)))}, then "
            "torch.tensor([number[name] for name in names]). If ids of two sides are compared, names in the table are "
            "those of both: [*query_names, *gallery_names]"
        )
    if kind == "O":
        return "Convert its objects to numbers first, such as torch.as_tensor(values.astype('int64'))"
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) and item.dim() for item in value):
        return "Use torch.stack()"
    if isinstance(value, (int, float, list, tuple)) or kind:
        return "Use torch.as_tensor()"
    return "Pass a tensor"


WHOLE = "Convert it with .long(), if its values are whole numbers"


def check_integers(name: str, values: Tensor, advice: str = WHOLE) -> None:
    """Check that a tensor has an integer type."""
    if values.dtype not in INTEGERS:
        raise DtypeError(f"{name} holds integers, got {values.dtype}. {advice}")


def check_floating(name: str, features: Tensor, dims: int, real_part: str = "Pass its real part, .real") -> None:
    """Check a floating tensor of ``dims`` dimensions. ``real_part``: what to do with a complex one."""
    check_tensor(name, features)
    if features.dtype not in FLOATS:
        how = real_part if features.is_complex() else "Convert it with .float()"
        raise DtypeError(
            f"{name} holds floating numbers (float16, bfloat16, float32 or float64), got {features.dtype}. {how}"
        )
    if features.dim() != dims:
        if hasattr(features, "ds_id") and features.numel() == 0:
            raise ConfigError(
                f"{name} is a whole parameter, got an empty one: DeepSpeed ZeRO-3 has not gathered it. Call "
                "the loss in the forward of the model that DeepSpeed runs, and read the parameter there as an "
                "attribute of its module (self.head.weight): DeepSpeed then gathers it, in backward too"
            )
        shape = "(rows, features)" if dims == 2 else f"of {dims} dimension{'s' * (dims != 1)}"
        how = ".unsqueeze(0)"
        if features.dim() == 0 or dims == 1:
            how = f".reshape({'1, ' * (dims - 1)}-1)"
        elif features.dim() > dims:
            how = ".flatten(0, -2)"
        raise ShapeError(f"{name} must be {shape}, got {tuple(features.shape)}. Reshape it, for instance with {how}")
    check_has_float64(name, features)


def check_has_float64(name: str, features: Tensor) -> None:
    """Check that the device supports float64, in which sums are kept for features of every type."""
    if features.is_mps:
        raise DeviceError(
            f"{name} must be on a device that has float64, in which sums of scores are kept, got {features.device}. "
            "Pass .cpu() of all tensors; autograd copies the gradients back"
        )


def autocast(features: Tensor) -> Tensor:
    """The features in the type of the active autocast region. Like autocast, leaves float64 unchanged."""
    kind = features.device.type
    if features.dtype == torch.float64 or kind not in AUTOCAST_DEVICES:
        return features
    if torch.is_autocast_enabled(kind):
        return features.to(torch.get_autocast_dtype(kind))
    return features


def check_sides(names: tuple[str, str], a: Tensor, b: Tensor, *, paired: bool = False) -> tuple[Tensor, Tensor]:
    """Check the features of two sides. Returns them, converted to autocast's type if autocast is on.

    ``paired``: row i of one side belongs to row i of the other. What is right is accepted by one condition; the checks
    below it find the words for what is wrong.
    """
    if (
        type(a) in PLAIN
        and type(b) in PLAIN
        and a.ndim == b.ndim == 2
        and a.shape[1] == b.shape[1]
        and a.dtype is b.dtype
        and a.dtype in FLOATS
        and a.device == b.device
        and a.layout is b.layout is torch.strided
        and not (a.is_nested or b.is_nested or a.is_mps)
        and not (paired and a.shape[0] != b.shape[0])
        and not (a.device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(a.device.type))
    ):
        return a, b
    a, b = check_features(names[0], a), check_features(names[1], b)
    check_together(names, a, b)
    if paired:
        check_same_rows(names, a, b)
    return a, b


def check_constant(name: str, value: Tensor) -> None:
    """Check that no gradient is expected for a tensor that gets none."""
    if value.requires_grad and torch.is_grad_enabled():
        raise GradientError(f"{name} is a constant and gets no gradient, but it requires grad. Pass {name}.detach()")


def check_together(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Check that two tensors have the same width, type and device."""
    first, second = names
    if a.shape[-1] != b.shape[-1]:
        transposed = b.dim() == 2 and a.shape[-1] == b.shape[0]
        is_classifier = second.endswith("weight")
        advice = (
            "Is it the classifier of another model?" if is_classifier else "Did one encoder skip its projection head?"
        )
        raise ShapeError(
            f"{first} and {second} need the same number of features, got {tuple(a.shape)} and {tuple(b.shape)}. "
            + (f"Pass {second}.T, if it is transposed" if transposed else advice)
        )
    check_device_and_type(names, a, b)


def check_device_and_type(names: tuple[str, str], a: Tensor, b: Tensor, convert: str = "one of them") -> None:
    """Check that two tensors are on the same device and have the same type. ``convert``: what the advice names."""
    check_device(names, a, b)
    if a.dtype != b.dtype:
        autocast = "" if torch.float64 in (a.dtype, b.dtype) else ", or run under torch.autocast"  # it leaves float64
        raise DtypeError(
            f"{names[0]} and {names[1]} need the same type, got {a.dtype} and {b.dtype}. Convert {convert} with "
            f".to(){autocast}"
        )


def check_device(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Check that two tensors are on the same device."""
    if a.device != b.device:
        raise DeviceError(f"{names[0]} and {names[1]} need one device, got {a.device} and {b.device}. Move one of them")


def check_same_rows(names: tuple[str, str], a: Tensor, b: Tensor) -> None:
    """Check that two tensors, paired row by row, have the same number of rows."""
    if a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"row i of {names[0]} belongs to row i of {names[1]}, so both need the same number of rows, "
            f"got {tuple(a.shape)} and {tuple(b.shape)}. Did a filter drop samples on one side only?"
        )


def reshape_advice(values: Tensor, numbers: int) -> str:
    """Advice for a tensor of another shape than one with this many numbers."""
    return "Reshape it" if values.numel() == numbers else "Did a filter drop some of its entries?"


def check_ids(name: str, ids: Tensor, sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Check integer ids, one for each row, on the device of the features. Returns them as int64."""
    check_tensor(name, ids, "a tensor of integers")
    if ids.dtype != torch.bool:
        check_integers(name, ids)
    if ids.dim() != 1 or ids.shape[0] not in sizes:
        wanted = " or ".join(f"({size},)" for size in dict.fromkeys(sizes))
        how = "Flatten it" if ids.numel() in sizes else "For several views of a sample, repeat its entry"
        raise ShapeError(f"{name} has one entry for each row, so its shape is {wanted}, got {tuple(ids.shape)}. {how}")
    check_device((name, "the features"), ids, like)
    return ids.long()


def check_scalar(name: str, value: float | Tensor, like: Tensor, *, positive: bool = False, rows: str = "") -> Tensor:
    """Check a number or a tensor of one element. Returns a 0-d tensor on the device of the features.

    ``rows``: how to give each row a value of its own, for the message.
    """
    stat = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.numel() != 1:
            raise ShapeError(
                f"{name} is one number, got a tensor of shape {tuple(value.shape)}. Pass one number"
                + (f". If every row has its own value, {rows}" if rows else "")
            )
        if not value.dtype.is_floating_point:
            raise DtypeError(f"{name} is a floating number, got {value.dtype}. Convert it with .float()")
        if value.device != like.device:
            if value.device.type != "cpu":
                check_device((name, "the features"), value, like)
            value = value.to(like.device)
        if can_read(value):
            number = value.item()
            if not math.isfinite(number):
                raise RangeError(f"{name} must be finite, got {number}. Check for a step with a very large gradient")
            _check_fits(name, number, stat)
            if positive and not number > 0:
                raise RangeError(f"{name} must be positive, got {number}. Is it a logarithm? Then pass its .exp()")
        return value if value.dim() == 0 else value.reshape(())  # avoids a needless view in the graph
    return torch.full((), check_number(name, value, positive=positive, dtype=stat), dtype=stat, device=like.device)


def check_scale(
    name: str, value: float | Tensor, like: Tensor, *, rows: str = "", checked: bool = False
) -> Tensor | float:
    """Check a factor of the scores. Returns a number as a float, and a tensor of one element as a 0-d tensor.

    ``checked``: such a tensor has been accepted before, except for its value.
    """
    number = None
    if type(value) is float:
        number = value
    elif checked and isinstance(value, Tensor) and value.ndim == 0 and value.device == like.device:
        number = value.item() if value.is_cpu else 0.0
    if number is not None and -LARGEST_SCALE < number < LARGEST_SCALE:
        return value
    found = check_scalar(name, value, like, rows=rows)
    return found if isinstance(value, Tensor) else float(value)


def scale_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    """The result of `check_scale` or `check_temperature` as a 0-d tensor on the device of the features."""
    if isinstance(scale, Tensor):
        return scale
    stat = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), scale, dtype=stat, device=like.device)


def check_temperature(value: float | Tensor, like: Tensor, *, rows: str = "") -> Tensor | float:
    """Check a temperature. Returns its reciprocal, by which the scores are multiplied, as `check_scale` does.

    The reciprocal is computed in the type of the statistics. In a narrower type its rounding error would amount to a
    different temperature.
    """
    if type(value) is float and 1.0 / LARGEST_SCALE < value < LARGEST_SCALE:
        return 1.0 / value
    number = check_scalar("temperature", value, like, positive=True, rows=rows)
    if number.dtype != torch.float64:
        number = number.to(torch.float64 if like.dtype == torch.float64 else torch.float32)
    if isinstance(value, Tensor) and not can_read(number):
        number = torch.where(number > 0, number, torch.nan)  # its value was not checked
    scale = number.reciprocal()
    if can_read(scale) and not torch.isfinite(scale):
        raise RangeError(
            f"1 / temperature must fit {str(scale.dtype).removeprefix('torch.')}, got a temperature of "
            f"{value.item() if isinstance(value, Tensor) else value}. Is it a logarithm? Then pass exp of it"
        )
    return scale if isinstance(value, Tensor) else 1.0 / value


def check_index(name: str, value: Any, advice: str) -> int:
    """Check a whole number, of Python or NumPy. Returns it as an int."""
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise DtypeError(f"{name} is a whole number, got {type(value).__name__} {value!r:.60}. {advice}")
    number = value if isinstance(value, int) else int(value)
    if not -(2**63) <= number < 2**63:
        raise RangeError(f"{name} must fit 64 bits, got an integer of {number.bit_length()} bits. {advice}")
    return number


def check_number(
    name: str, value: float, *, positive: bool = False, dtype: torch.dtype = torch.float32, per: str = ""
) -> float:
    """Check a finite Python number that fits ``dtype``. Returns it as a float.

    ``per``: the shape of the tensor that is accepted instead.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        wanted = f"a number, or a tensor of shape {per}" if per else "a number"
        raise DtypeError(f"{name} is {wanted}, got {type(value).__name__}. {_number_of(value, bool(per))}")
    if not -float("inf") < value < float("inf"):
        raise RangeError(f"{name} must be finite, got {value}. Check how it was computed")
    if positive and not value > 0:
        raise RangeError(f"{name} must be positive, got {value}. Is it a logarithm? Then pass math.exp() of it")
    _check_fits(name, value, dtype)
    return float(value)


def _number_of(value: Any, or_tensor: bool) -> str:
    """Advice on how to get a number from ``value``."""
    if isinstance(value, Tensor):
        return "Pass its .item()" if value.numel() == 1 else "Pass one number"
    if or_tensor and hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        return tensor_of(value)
    try:
        float(value)
    except Exception:  # whatever the object's own conversion raises
        return "Pass a number"
    return "Convert it with float()"


def _check_fits(name: str, value: float, dtype: torch.dtype) -> None:
    """Check that a finite number does not overflow."""
    if not -LARGEST[dtype] <= value <= LARGEST[dtype]:
        kind = str(dtype).removeprefix("torch.")
        shown = f"{value:g}" if isinstance(value, float) else f"an integer of {int(value).bit_length()} bits"
        raise RangeError(f"{name} must fit {kind}, up to {LARGEST[dtype]:.2g}, got {shown}. Check how it was computed")


def can_read(values: Tensor) -> bool:
    """Whether the host can read values without synchronizing with a device or breaking a graph."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return type(values) in (Tensor, torch.nn.Parameter) or not is_fake(values)
