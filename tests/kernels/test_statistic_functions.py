"""Kernels that take functions of statistics: a changed function is another kernel, also in the cache on the disk."""

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tilewise.kernels.triton_impl import launch, statistics
from tilewise.kernels.triton_impl.two_pass import backward_kernels, forward_kernels, positive_kernels, saved

KERNELS = (
    *(forward_kernels.forward_kernel, forward_kernels.merge_kernel, backward_kernels.gradient_kernel),
    *(positive_kernels.positive_gradient_kernel, saved.saved_gradient_kernel),
)


def total(x):
    return tl.sum(x, 0)


def largest(x):
    return tl.max(x, 0)


def parts_kernel(x, out, PARTS: tl.constexpr, CODE: tl.constexpr):
    tl.store(out, PARTS[0](tl.load(x + tl.arange(0, 16))))


def hashes(*, with_code: bool) -> set[str]:
    """Triton's keys on the disk of a kernel with a function, and with the same function after an edit."""
    kernel, found = JITFunction(parts_kernel), set()
    for function in (total, largest):
        made = JITFunction(function)
        made.fn.__qualname__, made._fn_name = "part", "part"
        constants = {(2,): (made,), (3,): launch.code_of(((made,),)) if with_code else ""}
        signature = {"x": "*fp32", "out": "*fp32", "PARTS": "constexpr", "CODE": "constexpr"}
        found.add(ASTSource(fn=kernel, signature=signature, constexprs=constants).hash())
    return found


def test_a_changed_function_changes_the_key_on_the_disk():
    assert len(hashes(with_code=False)) == 1  # if Triton sees functions in tuples one day, CODE may go
    assert len(hashes(with_code=True)) == 2


def test_code_is_that_of_all_functions_in_order():
    one, two = JITFunction(total), JITFunction(largest)
    assert launch.code_of(((one, (two,)), 3, None)) == one.cache_key + two.cache_key
    assert launch.code_of(((two, one),)) != launch.code_of(((one, two),))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_every_kernel_that_takes_functions_gets_their_code(kernel, monkeypatch):
    monkeypatch.setattr(launch, "code_of", lambda values: repr([v for v in values if isinstance(v, tuple)]))
    places, optional, _ = launch.declared(kernel)
    taken = {name: (statistics.part_top,) for name in ("PARTS", "SHARES", "FOLDS", "ROW_TERMS") if name in places}
    assert taken
    others = {name: 1 for name in places if name not in optional and name != "CODE"}
    found = launch.arguments_of(kernel, [others], taken)
    assert found["CODE"] == repr(list(taken.values()))
