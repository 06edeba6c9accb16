"""The interface of the package GradCache, implemented with `tilewise.cache`. Change the import and keep the code.

    from tilewise.integrations.grad_cache import GradCache

    step = GradCache(models=[question_model, passage_model], chunk_sizes=32, loss_fn=loss)
    loss = step(questions, passages, reduction="mean")

The functional decorators ``cached``, ``cat_input_tensor`` and ``gather_input_tensor`` are included. Differences: the
random state of every device is restored (also by ``cached``), the decorators accept tensors as keywords, inputs may be
nested, running statistics are updated once, and a frozen model runs once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.cache import Encoder, GradientCache
from tilewise.cache.autocast import Autocast
from tilewise.cache.chunks import call_with, count_rows, row_ranges, take_rows, tensors_of
from tilewise.cache.encoders import WatchedState, preserve_buffers
from tilewise.cache.randomness import RandomState, preserve_random_state, random_devices
from tilewise.cache.sync import synchronizing_modules
from tilewise.errors import ConfigError, DtypeError, GradientError


class GradCache:
    """A cached step with GradCache's signatures, computed by `tilewise.cache.GradientCache`.

    Args:
        models: one encoder per input.
        chunk_sizes: number of rows per call of a model: one number, or one per model.
        loss_fn: ``loss_fn(*representations, **loss_kwargs)`` returns a scalar.
        split_input_fn: ``split_input_fn(model_input, chunk_size)`` returns the list of chunks, for inputs that are
            not tensors.
        get_rep_fn: maps the output of a model to its representation.
        fp16: run models and loss under float16 autocast, and scale the loss with ``scaler``.
        scaler: a ``torch.amp.GradScaler``. Required with ``fp16``.

    A subclass may override ``split_inputs``, ``model_call``, ``get_reps`` and ``compute_loss``.

    >>> model, loss = nn.Linear(4, 2), lambda x, y: (x * y).sum()
    >>> step = GradCache([model, model], chunk_sizes=2, loss_fn=loss)
    >>> step(torch.ones(5, 4), torch.ones(5, 4)).shape, model.weight.grad.shape
    (torch.Size([]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], Any] | None = None,
        get_rep_fn: Callable[..., Tensor] | None = None,
        fp16: bool = False,
        scaler: Any = None,
    ) -> None:
        if fp16 and scaler is None:
            raise ConfigError("fp16=True needs a gradient scaler, got None. Pass scaler=torch.amp.GradScaler()")
        self.models = _modules(models)
        if not callable(loss_fn):
            raise DtypeError(f"loss_fn is a function of the representations, got {loss_fn!r:.60}. Pass a function")
        self.chunk_sizes = [chunk_sizes] * len(self.models) if isinstance(chunk_sizes, int) else list(chunk_sizes)
        if len(self.chunk_sizes) != len(self.models):
            raise ConfigError(
                f"chunk_sizes is one number or one per model, got {len(self.chunk_sizes)} for {len(self.models)} "
                "models. Pass one number for all"
            )
        self.loss_fn = loss_fn
        self.split_input_fn = split_input_fn
        self.get_rep_fn = get_rep_fn
        self.fp16 = fp16
        self.scaler = scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call ``cache_step``."""
        return self.cache_step(*args, **kwargs)

    def cache_step(self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any) -> Tensor:
        """Add the gradients of the whole batch to all models. Returns the detached loss.

        Args:
            model_inputs: one per model.
            no_sync_except_last: wrapped models (DDP, FSDP) reduce gradients once and not in every chunk.
            loss_kwargs: passed to the loss.
        """
        if no_sync_except_last and not all(synchronizing_modules([model]) for model in self.models):
            raise ConfigError(
                "no_sync_except_last=True needs every model wrapped in DistributedDataParallel or fully_shard, got one "
                "that is not. Wrap it, or leave no_sync_except_last out"
            )
        if len(model_inputs) != len(self.models):
            raise ConfigError(
                f"a step needs one input per model, got {len(model_inputs)} inputs for {len(self.models)} models. List "
                "a model twice if it encodes two inputs"
            )
        batches = [
            Chunks(list(self.split_inputs(batch, size)))
            for batch, size in zip(model_inputs, self.chunk_sizes, strict=True)
        ]
        cache = GradientCache(
            [self._encoder(model) for model in self.models],
            # Bound here, because GradientCache has keywords of the same names.
            functools.partial(self._loss, **loss_kwargs),
            chunk_size=1,
            sync="last" if no_sync_except_last else "every",
        )
        loss: Tensor = cache(*batches, scaler=self.scaler if self.fp16 else None)
        return loss

    def split_inputs(self, model_input: Any, chunk_size: int) -> list[Any]:
        """Split the input with ``split_input_fn``, or every tensor by rows."""
        if self.split_input_fn is not None:
            return list(self.split_input_fn(model_input, chunk_size))
        return [take_rows(model_input, rows) for rows in row_ranges(count_rows(model_input), chunk_size)]

    def model_call(self, model: nn.Module, model_input: Any) -> Any:
        """Call a model. A list is positional arguments, a mapping is keywords, a pair (list, mapping) is both."""
        with self._autocast(model):
            if isinstance(model_input, tuple) and [type(part) for part in model_input] == [list, dict]:
                return model(*model_input[0], **model_input[1])
            return call_with(model, model_input)

    def get_reps(self, model_out: Any) -> Any:
        """The representation in the output of a model."""
        return model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)

    def compute_loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:
        """The loss on all representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def _loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:
        with self._autocast(self.models[0]):
            return self.compute_loss(*reps, **loss_kwargs)

    def _encoder(self, model: nn.Module) -> Encoder:
        # A subclass or get_rep_fn may have parameters of its own. So a model is treated as frozen only without both.
        plain = type(self) is GradCache and self.get_rep_fn is None
        call = lambda chunk: self.get_reps(self.model_call(model, chunk))  # noqa: E731
        return Encoder(call, (model,), frozen=None if plain else False)

    def _autocast(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not self.fp16:
            return nullcontext()
        device = next((parameter.device.type for parameter in model.parameters()), "cuda")
        return torch.autocast(device, dtype=torch.float16)


class Chunks:
    """An input that is already split. Its rows are the chunks."""

    device = None

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks
        self.rows = len(chunks)
        self.tensors = tensors_of(chunks)

    def load(self, rows: slice) -> Any:
        """One chunk, as the only argument of its encoder."""
        return (self.chunks[rows.start],)


def cached(func: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Decorate a function that calls a model: it returns leaf representations and a closure for the second pass.

    After backward of the loss, call the closure with the representations:

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    >>> encode = cached(lambda x: model(x))
    >>> reps, push_gradient = encode(torch.ones(3, 4))
    >>> reps.square().sum().backward()
    >>> push_gradient(reps)
    >>> model[0].weight.grad.shape
    torch.Size([2, 4])
    """

    @functools.wraps(func)
    def first_pass(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        tensors = tensors_of((args, kwargs))
        modules = [item for item in (*args, *kwargs.values()) if isinstance(item, nn.Module)]
        modules += [module for module in Encoder.of(func).modules if module not in modules]
        devices = random_devices(tensors, modules)
        state, watched = RandomState.record(devices), WatchedState(modules)
        autocast = Autocast.record({"cpu", *(device.type for device in devices)})
        with torch.no_grad():
            leaves = [rep.detach().requires_grad_() for rep in _as_tuple(func(*args, **kwargs))]
        autocast.clear_cache()
        watched.keep_constant()

        def push_gradient(reps: Tensor | Sequence[Tensor]) -> None:
            grads = [rep.grad for rep in _as_tuple(reps)]
            if len(grads) != len(leaves):
                raise GradientError(f"there are {len(leaves)} representations, got {len(grads)}. Pass all of them")
            if any(grad is None for grad in grads):
                raise GradientError("the representations have no gradient. Call backward on the loss first")
            watched.check()
            with preserve_random_state(devices), preserve_buffers(modules, watched.buffers):
                state.restore()
                with torch.enable_grad(), autocast.active():
                    again = _as_tuple(func(*args, **kwargs))
                learned = [(rep, grad) for rep, grad in zip(again, grads, strict=True) if rep.requires_grad]
                torch.autograd.backward([rep for rep, _ in learned], [grad for _, grad in learned])

        return (*leaves, push_gradient)

    return first_pass


def _as_tuple(reps: Any) -> tuple[Tensor, ...]:
    return (reps,) if isinstance(reps, Tensor) else tuple(reps)


def _on_arguments(func: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def changed(*args: Any, **kwargs: Any) -> Any:
        keywords: Mapping[str, Any] = {name: change(value) for name, value in kwargs.items()}
        return func(*(change(value) for value in args), **keywords)

    return changed


def cat_input_tensor(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Concatenate every argument that is a list of tensors, positional or keyword.

    >>> total = cat_input_tensor(lambda x, *, y: (x * y).sum())
    >>> total([torch.ones(2), torch.ones(1)], y=[torch.ones(1), torch.ones(2)]).item()
    3.0
    """

    def join(value: Any) -> Any:
        tensors = isinstance(value, list) and value and all(isinstance(item, Tensor) for item in value)
        return torch.cat(value) if tensors else value

    return _on_arguments(func, join)


def gather_input_tensor(func: Callable[..., Tensor], axis: int = 0) -> Callable[..., Tensor]:
    """Concatenate every tensor argument over all ranks. Gradients flow to this rank's own part only.

    All ranks need equal shapes. Multiply the loss by the world size, because DDP averages the gradients.
    """

    def gather(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        parts = [torch.empty_like(value, requires_grad=False) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.detach().contiguous())
        parts[dist.get_rank()] = value
        return torch.cat(parts, dim=axis)

    return _on_arguments(func, gather)


def _modules(models: Any) -> list[nn.Module]:
    single = isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    found = [models] if single or not isinstance(models, Iterable) else list(models)
    if single or not all(isinstance(model, nn.Module) for model in found):
        raise DtypeError(
            "models is a list of modules, one for each input, got "
            f"{', '.join(type(model).__name__ for model in found)}. List a model twice if it encodes two inputs"
        )
    return found
