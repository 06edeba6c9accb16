"""Launches check the names of their arguments, and fall back to public calls with an unknown version of Triton."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

import triton
import triton.language as tl
from tests.kernels.interpreted import IN_THE_INTERPRETER
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl.launch import driver, prepared, replay
from tilewise.kernels.triton_impl.launch.prepared import Prepared, kernel

pytestmark = IN_THE_INTERPRETER
CPU = torch.device("cpu")


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
    Prepared(add_kernel, CPU, 4, 2).put(given).launch(1)
    assert torch.equal(given["out"], given["x"])
    Prepared(add_kernel, CPU, 4, 2).put(given).put({"bias": torch.tensor([2.0])}).launch(1)
    assert torch.equal(given["out"], given["x"] + 2.0)


def test_a_misspelled_name_is_an_error():
    with pytest.raises(TypeError, match="kernel add_kernel has no parameter biass"):
        Prepared(add_kernel, CPU, 4, 2).put({"x": torch.ones(5), "biass": None})


@pytest.mark.parametrize("how", ["never put", "None"])
@pytest.mark.parametrize("name", ["x", "n", "BLOCK"])
def test_a_missing_argument_is_an_error(name, how):
    given = {key: value for key, value in values().items() if key != name}
    work = Prepared(add_kernel, CPU, 4, 2).put(given).put({} if how == "never put" else {name: None})
    with pytest.raises(TypeError, match=f"kernel add_kernel misses the argument {name}"):
        work.launch(1)


def test_a_kernel_takes_what_it_declares_of_a_bundle():
    given = values()
    Prepared(add_kernel, CPU, 4, 2).offer(given | {"row_key": None, "m": 7}).launch(1)
    assert torch.equal(given["out"], given["x"])


def test_a_declaration_of_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="kernel bad has no parameter bias, m"):

        @kernel(optional=("bias",), dynamic=("m", "n"))
        def bad(x, n):
            pass


def test_what_a_compiled_kernel_depends_on():
    """Everything but the values of dynamic numbers and addresses."""

    def key(**changes):
        return Prepared(add_kernel, CPU, 4, 2).put(values() | {"bias": None} | changes)._key()

    assert key() == key(n=3, x=torch.zeros(5))
    different = {"n": 2**31}, {"n": 2.5}, {"BLOCK": 16}, {"bias": torch.ones(1)}, {"x": torch.ones(6)[1:]}
    for change in (*different, {"x": torch.ones(5).half()}):
        assert key(**change) != key()


class CompiledKernel:
    """Stands in for a kernel on a GPU, and lists the calls that are made."""

    def __init__(self):
        self.fn, self.__name__, self.calls = add_kernel.fn, "add_kernel", []

    def warmup(self, *args, **options):
        self.calls.append("warmup")
        return self

    def __getitem__(self, grid):
        self.calls.append(grid)
        return lambda *args, **options: self.calls.append(options)


@pytest.mark.parametrize("version", ["3.6.0", "3.6.1", "3.7.0", "3.9.0", "4.0.0"])
def test_an_unknown_version_gets_public_launches_only(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(prepared, "_compiled", {})
    known, made = version.startswith("3.6."), CompiledKernel()
    work = Prepared(made, torch.device("cuda"), 4, 2).put(values())
    work.launch(3)
    if known:
        assert made.calls == ["warmup", (3, 1, 1), {}]
    else:
        assert made.calls == [(3,), {"num_warps": 4, "num_stages": 2}]
        assert driver.DriverLaunch.of(work.compiled, 3, work.args, {}) is None
    assert (work.compiled is None) == (not known)


def test_an_unknown_version_replays_with_tensors(monkeypatch):
    """No address and no stand-in for a descriptor reaches Triton."""
    x, seen = torch.randn(32, 16), []
    recording = replay.Recording(CPU, [x])
    recording.launched(lambda *args: seen.extend(args), [x, TensorDescriptor.from_tensor(x, [16, 16]), 7], None, 1)
    made = recording.finish([x])
    # A tensor cannot be made on a GPU here; only the kind of device matters.
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    made.device = SimpleNamespace(type="cuda")
    other = torch.randn(32, 16)
    made.replay([other])
    assert seen[0] is other
    assert isinstance(seen[1], TensorDescriptor)
    assert seen[1].base is other
    assert list(seen[1].block_shape) == [16, 16]
    assert seen[2] == 7
