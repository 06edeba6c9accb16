"""Triton's interpreter without its slowest detours, so that its tests take a fifth of the time.

The interpreter patches the language again for every call of a helper, folds a custom reduction number by number, makes
a table of all types whenever it needs one of them, and looks for integer overflows only to discard what it finds (its
option `debug` is off). Every operation computes the type and the shape of its result anew, as objects of the language.
Here a module is patched once per launch, slices are folded, types and shapes are remembered, and overflows are not
looked for. Results are the same.
"""

import inspect

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def fold_slices(self, input):
    """``generic_reduce`` along one axis of one tensor."""
    assert len(input) == 1
    assert self.axis is not None
    assert not self.keep_dims
    first, *rest = np.moveaxis(input[0].handle.data, self.axis, 0)
    total = self.to_tensor(first, input[0].dtype)
    for part in rest:
        total = self.combine_fn.fn(total, self.to_tensor(part, input[0].dtype))
    return total


def keep_masks_boolean() -> None:
    """Let a comparison of scalars stay boolean when it is broadcast.

    The interpreter labels the result of a comparison with the type of its operands, and ``splat`` converts it to that
    type. Triton 3.9 then refuses it as a mask; versions before accept it.
    """
    plain = interpreter.InterpreterBuilder.create_splat

    def create_splat(self, ret_ty, arg):
        made = plain(self, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            made.data = made.data.astype(np.bool_)
        return made

    interpreter.InterpreterBuilder.create_splat = create_splat


def remember_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the type of a block and the shape of a tensor once for all that are equal."""
    plain_block, plain_tensor, plain_broadcast = (
        tl.block_type.__init__,
        tl.tensor.__init__,
        TritonSemantic.broadcast_impl_value,
    )
    blocks, shapes = {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(side, "value", side) for side in shape)
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        if type.name not in shapes:
            plain_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def broadcast(self, lhs, rhs):
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and list(one.shape) == list(other.shape):
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    monkeypatch.setattr(tl.block_type, "__init__", block_type)
    monkeypatch.setattr(tl.tensor, "__init__", tensor)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, {}

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched[fn.__module__] = patch(fn)
        return patched[fn.__module__]

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    builtins = {}

    def patch_builtins(owner, *how):
        if owner not in builtins:  # the first launch finds them all unpatched
            builtins[owner] = [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]
        for name in builtins[owner]:
            if tl.core.is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, *how)

    plain_type, types = interpreter._get_np_dtype, {}

    def remembered_type(kind):
        if kind.name not in types:  # two types are equal if their names are
            types[kind.name] = plain_type(kind)
        return types[kind.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", remembered_type)
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", fold_slices)
    remember_shapes(monkeypatch)
