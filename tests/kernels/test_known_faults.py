"""Known faults: "auto" avoids what they affect and says so once; a named backend is used, with a warning."""

import warnings

import pytest
import torch
from tests.kernels.marks import NEEDS_TRITON
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels import known_faults, registry
from tilewise.kernels.registry import forget_choices
from tilewise.kernels.spec import PairShape, PairSpec
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.options import TileOptions
from tilewise.tools.doctor import environment_problems
from tilewise.tools.tune import Untunable, check_tunable

pytestmark = NEEDS_TRITON
CARD = torch.device("cuda", 0)
ROWS = PairSpec(row_lse=True)
AUTO, NAMED = TileOptions(), TileOptions(backend="triton")


def shape():
    return PairShape(rows=64, cols=64, width=32, dtype=torch.float16, device=CARD)


@pytest.fixture
def machine(monkeypatch):
    """A function that fakes the version of Triton and the capability of the card."""

    def fake(version, capability):
        monkeypatch.setattr(known_faults, "triton_version", lambda: version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        known_faults.warn_once.cache_clear()
        registry.choose_backend.cache_clear()

    yield fake
    known_faults.warn_once.cache_clear()


@pytest.mark.parametrize("version", ["3.7.0", "3.7.1", "3.7.1+git1234"])
def test_auto_avoids_a_fault_and_warns_once(machine, monkeypatch, version):
    monkeypatch.setattr(TorchBackend, "scorer", lambda *args: "scorer of torch")
    machine(version, (9, 0))
    with pytest.warns(RuntimeWarning, match=r"Triton 3\.7 .* Hopper.*issues/11366.*backend=\"auto\" takes the torch"):
        assert registry.choose_backend(shape(), ROWS, AUTO).name == "torch"
    registry.choose_backend.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.choose_backend(shape(), ROWS, AUTO).name == "torch"
        assert registry.choose_scorer(CARD, 32, torch.float16, AUTO) == "scorer of torch"
    assert "issues/11366" in registry.refusals(shape(), ROWS, AUTO)["triton"]


def test_a_named_backend_is_used_with_a_warning(machine):
    machine("3.7.1", (9, 0))
    with pytest.warns(RuntimeWarning, match=r"issues/11366.*takes them nevertheless"):
        assert registry.choose_backend(shape(), ROWS, NAMED).name == "triton"
    assert registry.refusals(shape(), ROWS, NAMED) == {}


@pytest.mark.parametrize(
    "version, capability", [("3.6.0", (9, 0)), ("3.8.0", (9, 0)), ("3.7.1", (8, 0)), (None, (9, 0))]
)
def test_other_versions_and_cards_take_the_kernels(machine, version, capability):
    machine(version, capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.choose_backend(shape(), ROWS, AUTO).name == "triton"


@pytest.mark.parametrize("fault", known_faults.FAULTS, ids=lambda fault: fault.source)
def test_every_fault_is_met_on_its_cards(machine, fault):
    for capability in fault.capabilities:
        machine(fault.versions[0], capability)
        assert fault in known_faults.faults_on(CARD)
        assert known_faults.faults_on(torch.device("cpu")) == []
        if fault.avoided:
            with pytest.warns(RuntimeWarning):
                assert registry.choose_backend(shape(), ROWS, AUTO).name == "torch"


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.8.1+git1234", "3.9.0", "3.10.0"])
def test_the_assembler_before_13_3_is_known_on_hopper_cards(machine, version):
    """Triton 3.9 is the first that assembles for Hopper cards with a newer one. No remedy promises an older Triton."""
    old = int(version.split(".")[1]) < 9
    machine(version, (9, 0))
    found = known_faults.faults_on(CARD)
    assert any("ptxas before 13.3" in fault.what for fault in found) == old
    assert all("torch 2.15 or newer" in fault.remedy for fault in found)
    machine(version, (8, 0))
    assert known_faults.faults_on(CARD) == []


def test_explain_says_why(monkeypatch):
    """On the CPU, a fault in place of the reason that is there anyway."""
    x = torch.empty(8, 4)
    (found,) = tw.explain(tw.nt_xent, x).calls
    assert found.refused == (("triton", "it needs a CUDA device (or TRITON_INTERPRET=1, for tests)"),)
    reason = known_faults.FAULTS[0].reason
    monkeypatch.setattr(registry, "_why_not_load", lambda name, *args: reason if name == "triton" else None)
    assert f"backend   torch; triton not chosen: {reason}" in str(tw.explain(tw.nt_xent, x))
    named = tw.TileOptions(backend="torch")
    assert tw.explain(tw.nt_xent, x, options=named).calls[0].refused == ()


@pytest.fixture
def rocm(machine, monkeypatch):
    """A build of torch for AMD cards, which calls them cuda. The capability is that of an MI250."""
    machine("3.7.1", (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    forget_choices()
    yield
    forget_choices()


def test_amd_cards_take_the_torch_backend(rocm, monkeypatch):
    monkeypatch.setattr(TorchBackend, "scorer", lambda *args: "scorer of torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # faults of NVIDIA cards are none of theirs
        assert registry.choose_backend(shape(), ROWS, AUTO).name == "torch"
        assert registry.choose_scorer(CARD, 32, torch.float16, AUTO) == "scorer of torch"
        assert known_faults.faults_on(CARD) == []
    with pytest.raises(BackendError, match=r"for AMD cards \(ROCm 6\.4\.0\).*backend=\"auto\""):
        registry.choose_backend(shape(), ROWS, NAMED)


def test_explain_says_that_the_kernels_are_for_nvidia_cards(rocm):
    with FakeTensorMode():
        x = torch.empty(64, 32, device=CARD, dtype=torch.float16)
    (found,) = tw.explain(tw.nt_xent, x).calls
    assert found.backend == "torch"
    assert "made for NVIDIA cards, and this torch is for AMD cards" in dict(found.refused)["triton"]


def test_on_amd_cards_there_is_nothing_to_tune_or_to_install(rocm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Untunable, match="kernels for NVIDIA cards"):
        check_tunable()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    versions = {"torch": "2.13.0", "triton": None, "cuda": None, "driver": None}
    assert environment_problems(versions) == []
