"""The arguments that a loss passes to an operator: tensors, keys, weights, a spec, options, a group.

Arguments of an operator under `torch.compile` are tensors and plain values only. So the tensors of a call are the
arguments of an operator, and everything else is encoded as one string, a constant for the compiler. The operators'
schemas and the string are generated from the fields of the dataclasses. Encoding is plain formatting, which the
compiler can trace; decoding happens inside the operator.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise._version import __version__
from tilewise.kernels.backend import SMALL_TENSORS, SmallKey
from tilewise.kernels.spec import Needs, Pair, PairShape, PairSpec, RowWeights, stat_dtype
from tilewise.ops.budget import sized
from tilewise.options import TileOptions


class Function(torch.autograd.Function):
    """`torch.autograd.Function` whose `apply` takes no steps for transforms of `torch.func` while none is active."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As that of torch, which makes 17 more calls from Python."""
        transformed = torch._C._are_functorch_transforms_active()
        above: Any = super() if transformed else super(torch.autograd.Function, cls)
        return above.apply(*args)


class PairKeys(NamedTuple):
    """The keys, shifts and other tensors of rows and columns, in addition to features: see `tilewise.kernels.spec`."""

    row_key: Tensor | None = None
    col_key: Tensor | None = None
    row_skip: Tensor | None = None
    col_skip: Tensor | None = None
    row_shift: Tensor | None = None
    col_shift: Tensor | None = None
    col_weight: Tensor | None = None
    guide_a: Tensor | None = None
    guide_b: Tensor | None = None
    guide_scale: Tensor | None = None
    guide_bias: Tensor | None = None
    row_limit: Tensor | None = None
    row_norm: Tensor | None = None
    guide_norm: Tensor | None = None
    pick: Tensor | None = None
    row_scale: Tensor | None = None


NO_KEYS = PairKeys()
LEAVES = ("a", "b", "scale", "bias")  # differentiable; in an eager call the scale may be a number
KEYS = PairKeys._fields
GUIDE = KEYS.index("guide_a")
PICK, ROW_SCALE = KEYS.index("pick"), KEYS.index("row_scale")
WEIGHTS = ("weight", "square")
TENSORS = (*LEAVES, *KEYS, *WEIGHTS)  # the arguments of an operator, before the string
ALWAYS = ("a", "scale")  # never None


class Settings(NamedTuple):
    """Everything in a call that is not a tensor."""

    spec: PairSpec
    options: TileOptions
    group_name: str = ""  # "" for this process alone
    needs: Needs = Needs(a=False, b=False)  # which of the four leaves require a gradient
    share: float = 1.0  # the common weight of all rows of a scalar loss
    kept: bool = False  # and it is divided by the number of rows that are not ignored
    must_match: str = ""  # over a group: the loss's own settings, see `call_settings`


class Call(NamedTuple):
    """The arguments of an operator."""

    leaves: tuple[Any, ...]  # in the order of LEAVES
    others: tuple[Tensor | None, ...]  # in the order of KEYS and WEIGHTS
    settings: Settings

    @property
    def tensors(self) -> tuple[Any, ...]:
        """In the order of TENSORS."""
        a, b, scale, bias = self.leaves
        return (a, b, scale if isinstance(scale, Tensor) else self._scale_tensor(), bias, *self.others)

    def pair(self, *, number: bool = False) -> Pair:
        """The tensors without their graph, scale and bias in the type of the statistics.

        ``number``: a scale that is a number stays one.
        """
        a, b, scale, bias = self.leaves
        stat = stat_dtype(a.dtype)
        if isinstance(scale, Tensor):
            scale = scale.detach()
            if scale.dtype != stat:  # the check is five times faster than `to`
                scale = scale.to(stat)
        elif not number:
            scale = self._scale_tensor()
        if bias is not None:
            bias = bias.detach().to(stat)
        # The fields of `Pair` begin with LEAVES and KEYS, in this order.
        return Pair(a.detach(), (a if b is None else b).detach(), scale, bias, *self.others[: len(KEYS)])

    def _scale_tensor(self) -> Tensor:
        a = self.leaves[0]
        return torch.full((), self.leaves[2], dtype=stat_dtype(a.dtype), device=a.device)

    @property
    def options(self) -> TileOptions:
        """Those of the call, with the workspace for its sizes; n is that before ignored rows are dropped."""
        return sized(self.settings.options, self.shape, self.settings.spec, self.settings.needs)

    @property
    def row_weight(self) -> Tensor | None:
        """The weight of each row of a scalar loss: (n,); None if all rows have the weight ``settings.share``."""
        return self.others[len(KEYS)]

    def weights(self) -> RowWeights:
        """The weights of a scalar loss."""
        each, square = self.others[len(KEYS) :]
        return RowWeights(share=self.settings.share, kept=self.settings.kept, each=each, square=square)

    @property
    def shape(self) -> PairShape:
        """Sizes and types, also of fake tensors."""
        a, b = self.leaves[0], self.leaves[1]
        row_key, _, row_skip, col_skip = self.others[:4]
        guide_a, pick, row_scale = self.others[GUIDE], self.others[PICK], self.others[ROW_SCALE]
        (rows, width), cols = a.shape, a.shape[0] if b is None else b.shape[0]
        skips = row_skip is not None and col_skip is not None
        guide_width, picks = (0 if part is None else part.shape[1] for part in (guide_a, pick))
        kind = rows, cols, width, a.dtype, a.device, row_key is not None, skips, 0, guide_width
        return PairShape(*kind, picks=picks, has_row_scale=row_scale is not None)

    def small_key(self, shape: PairShape, *, scalar: bool = True) -> SmallKey:
        """What the work of a small call depends on; ``shape`` is that of the rows that count."""
        (spec, options, _, needs), (_, _, scale, bias) = self.settings[:4], self.leaves
        one_bias = bias is not None and bias.stride(0) == 0 and spec.softplus
        tensors = dict(zip(SMALL_TENSORS, (bias, *self.others[:4], *self.others[len(KEYS) :]), strict=True))
        present = {name for name, tensor in tensors.items() if tensor is not None}
        if isinstance(scale, Tensor):
            present.add("scale")
        kept = self.settings.kept
        return SmallKey(shape, spec, needs, options.precision, frozenset(present), one_bias, kept, scalar)


def operator_schema(more: str = "") -> str:
    """The schema of an operator: all tensors of a call, ``more``, and the settings.

    >>> operator_schema()[:45]
    '(Tensor a, Tensor? b, Tensor scale, Tensor? b'
    """
    tensors = ", ".join(f"Tensor{'' if name in ALWAYS else '?'} {name}" for name in TENSORS)
    return f"({tensors}, {more}str settings) -> Tensor[]"


def holds_numbers(features: Tensor) -> bool:
    """Whether the tensor has values: a compiler, an exporter and the meta device use stand-ins."""
    return type(features) in (Tensor, torch.nn.Parameter) and not features.is_meta and not torch.compiler.is_compiling()


def plain_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as an operator that a compiler can trace: ``tilewise::name``. Its first argument is a tensor.

    Eager calls of the result run ``function`` itself. Torch's dispatcher would import the compiler, and with it a
    module of torch that keeps a reference to the default process group for ever.
    """
    torch.library.custom_op(f"tilewise::{name}", function, mutates_args=()).register_fake(fake)

    def call(features: Tensor, *more: Any) -> Any:
        return (function if holds_numbers(features) else getattr(torch.ops.tilewise, name))(features, *more)

    return call


def needs_of(a: Tensor, b: Tensor | None, scale: Tensor | float, bias: Tensor | None) -> Needs:
    """Which of rows, columns, scale and bias require a gradient here."""
    if not torch.is_grad_enabled():
        return Needs(a=False, b=False)
    return Needs(
        a.requires_grad,
        b is not None and b.requires_grad,
        isinstance(scale, Tensor) and scale.requires_grad,
        bias is not None and bias.requires_grad,
    )


# (name, type) of each field, as a tuple that a compiler can loop over.
SPEC_FIELDS = tuple((field.name, str(field.type)) for field in dataclasses.fields(PairSpec))
OPTION_FIELDS = tuple((field.name, str(field.type)) for field in dataclasses.fields(TileOptions))


def revision_of(package: Path) -> str:
    """The version, and a digest of the files that decide what an operator saves: they change between releases, too."""
    digest = hashlib.sha256()
    for file in sorted([*package.glob("ops/**/*.py"), *package.glob("kernels/**/*.py")]):
        digest.update(file.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:12]}"


REVISION = revision_of(Path(__file__).parent.parent)


def encode(settings: Settings) -> str:
    """One line that `decode` reads back.

    It starts with `REVISION`: torch caches compiled graphs on disk, with the sizes of what an operator saves. Another
    revision may save something else.

    A float is written with all its digits, without "!r": from Python 3.13 on torch.compile cannot trace that for the
    symbols of dynamic=True.
    """
    spec = ",".join([_text(getattr(settings.spec, name), kind) for name, kind in SPEC_FIELDS])
    options = ",".join([_text(getattr(settings.options, name), kind) for name, kind in OPTION_FIELDS])
    needs = ",".join([f"{int(need)}" for need in settings.needs])
    numbers = f"{needs};{float(settings.share)};{int(settings.kept)}"
    return f"{REVISION};{spec};{options};{numbers};{settings.must_match};{settings.group_name}"


def call_settings(group_name: str, **settings: Any) -> str:
    """Settings of a loss as "name=value name=value", which the ranks of a group compare before they exchange anything.

    "" without a group.
    Everything that changes a result and is not a tensor belongs here, unless `PairSpec` or `TileOptions` has it. Of a
    tensor, only that it is one is compared: reading its value would synchronize.

    >>> call_settings("a group", reduction="mean", temperature=0.1, shift=True, weight=None)
    'reduction=mean temperature=0.1 shift=1 weight=None'
    """
    return " ".join([f"{name}={_shown(value)}" for name, value in settings.items()]) if group_name else ""


def _shown(value: Any) -> str:
    """Converted to plain numbers, because torch.compile may pass symbolic ones."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, int):
        return f"{int(value)}"
    return f"{float(value)}" if isinstance(value, float) else f"{value}"


def _text(value: Any, kind: str) -> str:
    if kind == "bool" or kind == "int" or (kind == "WorkspaceMib" and isinstance(value, int)):
        return f"{int(value)}"
    number = kind == "float" or (kind == "FilterTolerance" and value != "rounding")
    return f"{float(value)}" if number else f"{value}"


def _value(text: str, kind: str) -> Any:
    if kind == "bool":
        return text == "1"
    if kind == "FilterTolerance":
        return text if text == "rounding" else float(text)
    if kind == "WorkspaceMib":
        return None if text == "None" else text if text == "auto" else int(text)
    return {"int": int, "float": float}.get(kind, str)(text)


@functools.lru_cache(maxsize=256)
def decode(settings: str) -> Settings:
    """Undo `encode`.

    >>> decode(encode(Settings(PairSpec(row_lse=True, softcap=30.0), TileOptions()))).spec.softcap
    30.0
    """
    _, spec, options, needs, share, kept, must_match, group = settings.split(";", 7)

    def read(text: str, fields: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        return {name: _value(part, kind) for part, (name, kind) in zip(text.split(","), fields, strict=True)}

    return Settings(
        spec=PairSpec(**read(spec, SPEC_FIELDS)),
        options=TileOptions(**read(options, OPTION_FIELDS)),
        group_name=group,
        needs=Needs(*(need == "1" for need in needs.split(","))),
        share=float(share),
        kept=kept == "1",
        must_match=must_match,
    )
