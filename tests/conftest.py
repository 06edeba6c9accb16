"""What all tests share: one thread each, no hidden deadlines, and memory that shows when it is read unwritten."""

import contextlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import threading
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; test processes run side by side
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two threads beside other tests would wait in loops for each other
# A child compiles this package where there is no bytecode, as torch has, so the first one writes it for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ranks talk over the loopback interface, so no name of this machine has to lead anywhere.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

try:
    from hypothesis import settings
except ImportError:  # a machine with a GPU may lack it; no test there asks for it
    pass
else:
    settings.register_profile("tilewise", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("tilewise")
torch.set_num_threads(1)

MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Without Triton (macOS, for instance) the modules that import its kernels are skipped."""
    report = yield
    if report.failed and not HAS_TRITON and "No module named 'triton'" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, "Skipped: triton is not installed on this platform")
    return report


@pytest.fixture
def set_limits():
    """Change thresholds of `tilewise.ops.limits` until the end of the test: set_limits(small=0)."""
    from tilewise.ops import limits

    with contextlib.ExitStack() as stack:
        yield lambda **values: stack.enter_context(limits.changed(**values))


@pytest.fixture(autouse=True)
def no_small_batches(request):
    """In tests/kernels calls of few rows take the strategies of large ones, except in the tests of small batches."""
    if request.path.parent.name == "kernels" and "small" not in request.path.name:
        request.getfixturevalue("set_limits")(small=0, small_cpu=0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test of memory is skipped where the system does not count it (macOS). On Linux it fails."""
    from benchmarks.measure import NoCounterError

    try:
        return (yield)
    except NoCounterError as error:
        if sys.platform.startswith("linux"):
            raise
        pytest.skip(str(error))


def pytest_sessionstart():
    """Triton 3.9's interpreter refuses masks that it has itself turned into int32: see `keep_masks_boolean`."""
    if os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON:
        from tests.kernels.quick_interpreter import keep_masks_boolean

        keep_masks_boolean()


@pytest.fixture
def cpp_compiler():
    """torch.compile writes C++ for a CPU, which needs a compiler and Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler {compiler} on this machine (Debian package: g++)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no headers of Python on this machine (Debian package: python3-dev)")


@pytest.fixture
def nan_filled_empty(monkeypatch):
    """Uninitialized memory of floating type is NaN, so that whoever reads it before writing is found out.

    So are bytes: a recording takes the memory of several tensors as such.
    """

    def filled(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.uint8:
                return tensor.fill_(255)  # NaN in every type
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    for owner, name in MAKERS:
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(autouse=True)
def fresh_routes():
    """Tests change thresholds and backends: no choice of an earlier test is remembered.

    Nor does torch remember: on a CPU without bfloat16 its first bfloat16 product turns oneDNN off for the process, and
    float32 products round differently from then on.
    """
    from tilewise.kernels.registry import forget_choices

    torch._C._set_mkldnn_enabled(True)
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def set_tiles(monkeypatch):
    """Change the sizes of the torch backend's tiles until the end of the test: set_tiles(rows, cols, symmetric)."""
    from tilewise.kernels.torch_impl import tiles

    def change(rows, cols, symmetric):
        monkeypatch.setattr(tiles, "TILE_ROWS", rows)
        monkeypatch.setattr(tiles, "TILE_COLS", cols)
        monkeypatch.setattr(tiles, "SYMMETRIC_TILE", symmetric)

    return change


@pytest.fixture
def small_tiles(set_tiles, set_limits):
    """Tiles so small that every case meets several of them, with ragged edges; also for small batches."""
    set_limits(small=0, small_cpu=0)
    set_tiles(48, 80, 48)


@pytest.fixture
def one_parser(monkeypatch):
    """Threads parse kernels for the interpreter in turn: Python 3.11 counts the depth of all of them together."""
    from triton.runtime.interpreter import FunctionRewriter

    lock, rewrite = threading.Lock(), FunctionRewriter.rewrite_ast

    def in_turn(self):
        with lock:
            return rewrite(self)

    monkeypatch.setattr(FunctionRewriter, "rewrite_ast", in_turn)


@pytest.fixture
def filter_on_cpu(monkeypatch):
    """The torch backend has a filter, the oracle: for tests of the method, and of what surrounds the kernels."""
    from tests.dense_filter import DenseFilter

    from tilewise.kernels.torch_impl.backend import TorchBackend

    monkeypatch.setattr(TorchBackend, "filtered", DenseFilter())


@pytest.fixture
def never_dense(monkeypatch):
    """The filter is used however many entries are kept."""
    from tilewise.kernels import filter_plan

    monkeypatch.setattr(filter_plan, "DENSE_SHARE", 2.0)


@pytest.fixture
def quick(monkeypatch):
    """Triton's interpreter with less work around each operation, and no recordings: sizes change from test to test."""
    from tests.kernels.quick_interpreter import make_quick

    from tilewise.kernels.triton_impl import scores

    make_quick(monkeypatch)
    monkeypatch.setattr(scores, "_programs", {})


@pytest.fixture
def tiny_workspace(monkeypatch):
    """So little that a hundred rows need several macro-tiles in both axes."""
    from tests.kernels.interpreted import take_tiny_workspace

    take_tiny_workspace(monkeypatch)
