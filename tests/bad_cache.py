"""Bad inputs of the gradient cache: see `tests.bad_inputs`. What is compared is the loss beside its gradient."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.cache import Encoder, GradientCache, HostBatch, LazyBatch, cached_encode, cached_loss, cached_step
from tilewise.cache.chunks import tensors_of
from tilewise.errors import ConfigError, DeviceError, DtypeError, GradientError, ShapeError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
POSITION = torch.arange(4.0)


def tower() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(4, 2)


def loss(*z: Any) -> Tensor:
    return sum(part.square().sum(1).mean() for part in tensors_of(z))


def learned(module: nn.Module, value: Any) -> Tensor:
    """The loss, and the gradients of all parameters."""
    return torch.cat([value.detach().reshape(1).double(), *(p.grad.flatten().double() for p in module.parameters())])


def plain(*inputs: Tensor, encode: Callable[[nn.Module, Tensor], Tensor] | None = None, of: Any = loss) -> Tensor:
    """A step without chunks, in float64."""
    module = tower().double()
    value = of(*(module(x.double()) if encode is None else encode(module, x.double()) for x in inputs))
    value.backward()
    return learned(module, value)


def stepped(inputs: Any, *, of: Any = loss, encoder: Any = None, chunk_size: Any = 2, **how: Any) -> Tensor:
    """A step in chunks. ``encoder``: makes one from the module."""
    module = tower()
    used = module if encoder is None else encoder(module)
    return learned(module, cached_step(used, inputs, of, chunk_size=chunk_size, **how))


def refused(inputs: Any = None, **how: Any) -> Callable[[], object]:
    return lambda: stepped([X] if inputs is None else inputs, **how)


def shrinking(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """An encoder that returns fewer rows from its fourth call on, which is the first of the second pass."""
    calls = itertools.count()
    return lambda x: module(x)[: 2 if next(calls) < 3 else 1]


def growing(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """An encoder that returns more tensors from its fourth call on."""
    calls = itertools.count()
    return lambda x: (module(x),) * (1 if next(calls) < 3 else 2)


def backward_twice() -> None:
    value = cached_loss(tower(), [X], loss, chunk_size=2)
    value.backward(create_graph=True)


def gradient_of_inputs() -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(cached_loss(tower(), [x], loss, chunk_size=2), [x])


def gradient_in_grad() -> tuple[Tensor, Tensor]:
    x, module, exact = X.clone().requires_grad_(), tower(), X.double().requires_grad_()
    cached_loss(module, [x], loss, chunk_size=2).backward()
    loss(tower().double()(exact)).backward()
    return x.grad, exact.grad


def second_derivative() -> tuple[Tensor, Tensor]:
    """Without the cache, of the norm of the gradient."""
    found = []
    for kind in (torch.float32, torch.float64):
        module = tower().to(kind)
        (grad,) = torch.autograd.grad(loss(module(X.to(kind))), module.weight, create_graph=True)
        grad.square().sum().backward()
        found.append(module.weight.grad)
    return found[0], found[1]


def without_gradient(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def accumulated() -> tuple[Tensor, Tensor]:
    module = tower()
    for _ in range(2):
        value = cached_step(module, [X], loss, chunk_size=2, backward_scale=1 / 2)
    return learned(module, value), plain(X)


def by_method(call: Callable[[GradientCache], Tensor]) -> Tensor:
    return call(GradientCache(tower(), loss, chunk_size=4))


BAD = {
    # inputs
    "inputs of different rows": (
        refused([(X, X[:5])]),
        ShapeError,
        ("need the same number of rows", r"\(6, 4\), \(5, 4\)", "functools.partial"),
        lambda: (
            stepped([X], encoder=lambda module: functools.partial(lambda p, x: module(x + p), POSITION)),
            plain(X, encode=lambda module, x: module(x + POSITION)),
        ),
    ),
    "an input without rows": (
        refused([X[:0]]),
        ShapeError,
        ("needs at least one row", "no rows", "Skip empty batches"),
    ),
    "an input without tensors": (
        refused([["a", "b"]]),
        DtypeError,
        ("at least one tensor with rows", "a list", r"LazyBatch\(rows, load\)"),
        lambda: (stepped([LazyBatch(6, lambda first, last: X[first:last])]), plain(X)),
    ),
    "a tensor for inputs": (
        refused(X),
        DtypeError,
        ("inputs is a list with one input for each encoder", "Tensor", r"Pass \[batch\]"),
        lambda: (stepped([X]), plain(X)),
    ),
    "fewer inputs than encoders": (
        refused([X, Z], encoder=lambda module: [module, module, module]),
        DtypeError,
        ("numbers of inputs and encoders must be equal", "2 inputs for 3 encoders", "all inputs without a list"),
        lambda: (stepped([X, Z], encoder=lambda module: module), plain(X, Z)),
    ),
    "no encoder": (
        refused(encoder=lambda module: [3]),
        DtypeError,
        ("an encoder is a module, or a function of a chunk", "got 3", "Pass one of these"),
        lambda: (stepped([X], encoder=lambda module: [lambda x: module(x)]), plain(X)),
    ),
    "an Encoder of nothing": (
        lambda: Encoder(3),
        DtypeError,
        ("an encoder is a module, or a function of a chunk", "got 3", "Pass one of these"),
        lambda: (stepped([X], encoder=lambda module: Encoder(module, (module,))), plain(X)),
    ),
    "a module for modules": (
        lambda: Encoder(tower(), tower()),
        DtypeError,
        ("modules is a tuple of the modules", "Linear", r"Pass \(module,\) for one module"),
        lambda: (stepped([X], encoder=lambda module: Encoder(module, (module,))), plain(X)),
    ),
    # settings
    "chunks of 0 rows": (refused(chunk_size=0), ConfigError, ("whole number of rows, at least 1", "got 0", "Pass one")),
    "chunks of True": (refused(chunk_size=True), ConfigError, ("a whole number of rows", "got True", "Pass one")),
    "chunk sizes of two encoders": (
        refused(chunk_size=[2, 2]),
        ConfigError,
        ("one number or one per encoder", "2 numbers for 1", "Pass one number for all"),
        lambda: (stepped([X], chunk_size=2), plain(X)),
    ),
    "a function of other chunk sizes": (
        refused(chunk_size=lambda batch: [2, 2]),
        ConfigError,
        ("number of rows of each chunk, 6 together", r"\[2, 2\]", "Return whole numbers that add up to it"),
        lambda: (stepped([X], chunk_size=lambda batch: [2, 4]), plain(X)),
    ),
    "a sync that is none": (
        refused(sync="never"),
        ConfigError,
        ("no sync", "'never'", "choose one of last, every"),
        lambda: (stepped([X], sync="every"), plain(X)),
    ),
    "buffers that are none": (
        refused(buffers="no"),
        ConfigError,
        ("no buffers", "'no'", "choose one of once, twice"),
        lambda: (stepped([X], buffers="twice"), plain(X)),
    ),
    "progress of a step as text": (
        refused(progress="bar"),
        DtypeError,
        (r"progress is a function of \(chunk, chunks, phase\)", "str 'bar'", "a function of your own"),
        lambda: (stepped([X], progress=lambda chunk, chunks, phase: None), plain(X)),
    ),
    "a scaler that is none": (
        refused(scaler=2.0),
        DtypeError,
        ("scaler is a torch.amp.GradScaler", "float", "Pass one, or None"),
        lambda: (stepped([X], scaler=None), plain(X)),
    ),
    "a scale of two gradients": (
        refused(backward_scale=torch.ones(2)),
        DtypeError,
        ("backward_scale is one real number", r"Tensor of shape \(2,\)", "Pass 1 / steps"),
        accumulated,
    ),
    "a device that is none": (
        refused(offload="gpu"),
        DeviceError,
        ("device is for example 'cuda'", "'gpu'", "Pass a name like these, or 'cpu'"),
        lambda: (stepped([X], offload="cpu"), plain(X)),
    ),
    "a pin that is none": (
        lambda: HostBatch(X, "cpu", pin="no"),
        ConfigError,
        ("no pin", "'no'", "choose one of chunk, batch"),
        lambda: (stepped([HostBatch(X, "cpu", pin="batch")]), plain(X)),
    ),
    "a host batch with a gradient": (
        lambda: HostBatch(X.clone().requires_grad_(), "cpu"),
        GradientError,
        ("cannot have a gradient", "requires one", "without offload, or detach it"),
        lambda: (stepped([HostBatch(X.clone().requires_grad_().detach(), "cpu")]), plain(X)),
    ),
    "a lazy batch of a tensor": (
        lambda: LazyBatch(3, X),
        DtypeError,
        (r"load is a function of \(first, last\)", "tensor", "Pass a function"),
        lambda: (stepped([LazyBatch(6, lambda first, last: X[first:last])]), plain(X)),
    ),
    "a lazy batch of no rows": (
        lambda: LazyBatch(0, lambda first, last: X),
        ShapeError,
        ("at least one row", "rows=0", "Skip empty batches"),
    ),
    # losses
    "no loss": (
        refused(of=3),
        DtypeError,
        ("loss is a function of the representations", "got 3", "Pass a function"),
        lambda: (stepped([X], of=lambda z: loss(z)), plain(X)),
    ),
    "a loss for each row": (
        refused(of=lambda z: z.square().sum(1)),
        ShapeError,
        ("the loss must be a scalar", r"\(6,\)", "Take its mean"),
        lambda: (stepped([X], of=lambda z: z.square().sum(1).mean()), plain(X)),
    ),
    "a loss that is a number": (
        refused(of=lambda z: loss(z).item()),
        DtypeError,
        ("a loss function returns a scalar tensor", "float", "Return a tensor, without .item"),
        lambda: (stepped([X], of=lambda z: loss(z)), plain(X)),
    ),
    "a step without gradients": (
        lambda: without_gradient(refused()),
        GradientError,
        ("a step needs gradients", "no_grad", "Use .encode instead"),
        lambda: (
            without_gradient(lambda: by_method(lambda cache: cache.encode(X)[0])),
            tower().double()(X.double()),
        ),
    ),
    "nothing to train": (
        lambda: cached_step(tower().requires_grad_(False), [X], loss, chunk_size=2),
        GradientError,
        ("nothing to train", "no encoder, input or parameter", r"Was everything frozen\?"),
    ),
    # encoders
    "an encoder of text": (
        refused(encoder=lambda module: lambda x: "no"),
        DtypeError,
        ("must return at least one tensor", "a str", "Return its representations"),
        lambda: (stepped([X], encoder=lambda module: lambda x: module(x)), plain(X)),
    ),
    "outputs of different widths": (
        refused([X[:5]], encoder=lambda module: lambda x: module(x)[:, : len(x)]),
        ShapeError,
        ("equal shapes except for their rows", r"\(1, 1\)", "Pad to a fixed length"),
        lambda: (stepped([X[:5]], encoder=lambda module: lambda x: module(x)), plain(X[:5])),
    ),
    "outputs of different numbers": (
        refused(encoder=lambda module: lambda x: (module(x),) * (1 + int(x[0, 0] == X[0, 0]))),
        ShapeError,
        ("for different chunks", r"\[1, 2\] tensors", "must return the same structure for every chunk"),
        lambda: (stepped([X], encoder=lambda module: lambda x: (module(x),)), plain(X)),
    ),
    "another output in the second pass": (
        refused(encoder=shrinking),
        GradientError,
        ("must return the same result twice", r"shape \(1, 2\) instead of \(2, 2\)", r"the first pass changed\?"),
    ),
    "more outputs in the second pass": (
        refused(encoder=growing),
        GradientError,
        ("must return the same result twice", "2 tensors instead of 1", r"the first pass changed\?"),
    ),
    "an encoder that writes into its input": (
        lambda: stepped([X.clone()], encoder=lambda module: lambda x: module(x.div_(2))),
        GradientError,
        ("cannot be encoded again", "changed in place", r"use x = x / 255 instead of x /= 255"),
        lambda: (
            stepped([X.clone()], encoder=lambda module: lambda x: module(x / 2)),
            plain(X, encode=lambda module, x: module(x / 2)),
        ),
    ),
    # derivatives
    "a second derivative of a step": (
        backward_twice,
        GradientError,
        ("no second derivative", "create_graph=True", "Encode without the cache"),
        second_derivative,
    ),
    "a gradient without backward": (
        gradient_of_inputs,
        GradientError,
        (r"are added to \.grad", "inputs=", r"Call loss\.backward\(\)"),
        gradient_in_grad,
    ),
    "a batch encoded by nothing": (
        lambda: cached_encode(3, X, chunk_size=4),
        DtypeError,
        ("an encoder is a module", "got 3", "Pass one of these"),
        lambda: (cached_encode(tower(), X, chunk_size=4), tower().double()(X.double())),
    ),
}
