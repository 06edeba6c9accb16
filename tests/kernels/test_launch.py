"""Launches check the names of their arguments; a kernel is compiled once for each kind of arguments."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

import triton
import triton.language as tl
from tests.kernels.interpreted import IN_THE_INTERPRETER
from triton.knobs import HookChain
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.errors import BackendError
from tilewise.kernels.triton_impl import launch as launching
from tilewise.kernels.triton_impl.launch import compiled_launch, kernel, launch

pytestmark = IN_THE_INTERPRETER
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@kernel(optional=("bias",), dynamic=("n",))
def add_kernel(x, bias, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    if bias is not None:
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < n)


def values():
    return {"x": torch.arange(5.0), "out": torch.zeros(5), "n": 5, "BLOCK": 8}


def test_an_optional_argument_may_be_missing():
    given = values()
    launch(add_kernel, 1, CPU, **given)
    assert torch.equal(given["out"], given["x"])
    launch(add_kernel, 1, CPU, **given, bias=torch.tensor([2.0]))
    assert torch.equal(given["out"], given["x"] + 2.0)


def test_a_misspelled_name_is_an_error():
    with pytest.raises(TypeError, match="kernel add_kernel has no parameter biass"):
        launch(add_kernel, 1, CPU, **values(), biass=None)


@pytest.mark.parametrize("how", ["not given", "None"])
@pytest.mark.parametrize("name", ["x", "n", "BLOCK"])
def test_a_missing_argument_is_an_error(name, how):
    given = {key: value for key, value in values().items() if key != name} | ({name: None} if how == "None" else {})
    with pytest.raises(TypeError, match=f"kernel add_kernel misses the argument {name}"):
        launch(add_kernel, 1, CPU, **given)


def test_a_kernel_takes_what_it_declares_of_bundles():
    """The last bundle wins, and what is given by name wins over bundles."""
    given = values()
    launch(add_kernel, 1, CPU, given | {"row_key": None, "n": 7}, {"n": 5, "BLOCK": 4, "m": 7}, BLOCK=8)
    assert torch.equal(given["out"], given["x"])


def test_a_declaration_of_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="kernel bad has no parameter bias, m"):

        @kernel(optional=("bias",), dynamic=("m", "n"))
        def bad(x, n):
            pass


class CompiledKernel:
    """Stands in for a kernel on a GPU, and lists the calls that are made."""

    def __init__(self):
        self.fn, self.calls = add_kernel.fn, []
        self.function, self.packed_metadata = "function", "metadata"

    def warmup(self, *args, grid, **options):
        self.calls.append(options)
        return self

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("with hooks", grid, len(args)))

    def run(self, *args):
        self.calls.append((*args[:9], len(args) - 9))


@pytest.fixture
def capturing(monkeypatch):
    """Whether a CUDA graph is captured: a list of one answer."""
    found = [False]
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found[0])
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: f"stream of {index}"))
    return found


@pytest.mark.usefixtures("capturing")
def test_what_a_compiled_kernel_depends_on():
    """Everything but the values of dynamic numbers, addresses and the size of the grid."""
    made, given = CompiledKernel(), {"x": torch.zeros(5), "bias": None, "out": torch.zeros(5), "n": 5, "BLOCK": 8}

    def compiles(device=CARD, warps=4, stages=2, programs=3, **changes):
        made.calls.clear()
        arguments = [*(given | changes).values()]
        compiled_launch(made, programs, arguments, device, warps, stages)(*arguments)
        stream = f"stream of {device.index}"
        assert made.calls[-1] == (programs, 1, 1, stream, "function", "metadata", None, None, None, 5)
        return len(made.calls) == 2

    assert compiles()
    assert made.calls[0] == {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert not compiles(n=3, x=torch.zeros(9), programs=7)
    wide, narrow = (TensorDescriptor.from_tensor(torch.zeros(32, 16), [16, size]) for size in (16, 8))
    different = {"n": 2**31}, {"n": 2.5}, {"BLOCK": 16}, {"bias": torch.ones(1)}, {"x": torch.ones(6)[1:]}
    different += {"x": torch.ones(5).half()}, {"x": wide}, {"x": narrow}
    for change in (*different, {"warps": 8}, {"stages": 3}, {"device": torch.device("cuda", 1)}):
        assert compiles(**change), change
        assert not compiles(**change), change


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_profilers_are_called_by_tritons_launcher(name, monkeypatch):
    """Those that are added later too; a hook may also be a plain function, or None."""
    made = CompiledKernel()
    start = compiled_launch(made, 7, [None, None, None, 5, 8], CARD, 4, 2)

    def hooked():
        start(1, 2)
        return made.calls[-1] == ("with hooks", (7, 1, 1), 2)

    assert not hooked()
    chain = HookChain()
    monkeypatch.setattr(triton.knobs.runtime, name, chain)
    assert not hooked()
    chain.add(print)
    assert hooked()
    chain.remove(print)
    assert not hooked()
    monkeypatch.setattr(triton.knobs.runtime, name, print)
    assert hooked()
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    assert not hooked()


def test_no_kernel_is_loaded_while_a_graph_is_captured(capturing):
    """Loading would end the capture with an error of the driver that names no cause. Known kernels can be launched."""
    how, capturing[0] = (CompiledKernel(), 1, [None, None, None, 5, 8], CARD, 4, 2), True
    with pytest.raises(BackendError) as raised:
        compiled_launch(*how)
    assert str(raised.value) == (
        "kernels cannot be loaded while a CUDA graph is captured. Call the loss once with tensors of these shapes "
        "before capturing"
    )
    capturing[0] = False
    compiled_launch(*how)
    capturing[0] = True
    compiled_launch(*how)()
