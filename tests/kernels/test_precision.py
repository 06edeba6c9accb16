"""Calls with different precisions of float32 products, in several threads."""

import threading
import time

import pytest
import torch
from tests.compare import assert_close

import tilewise as tw
from tilewise.kernels import precision as kernels
from tilewise.kernels.precision import float32_precision, matmul_precision
from tilewise.kernels.torch_impl.tiles import Tiles

LIMIT_S = 20
WANTED = {"torch": "highest", "highest": "highest", "high": "high"}


@pytest.fixture(autouse=True)
def unchanged():
    """The process has the default before and after."""
    before = state()
    assert before == ("highest", "none", "none")
    yield
    assert state() == before


def state():
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in backends)


def process_precision():
    return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def in_threads(*works):
    """Run functions side by side. Raises the first error."""
    errors = []

    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_every_thread_has_its_own_precision():
    counts = dict.fromkeys(WANTED, 0)

    def worker(kind, inner):
        def work():
            for _ in range(60):
                with matmul_precision(kind):
                    for _ in range(3):
                        assert process_precision() == float32_precision() == WANTED[kind]
                        time.sleep(1e-5)
                    with matmul_precision(inner):
                        assert process_precision() == WANTED[kind if inner == "torch" else inner]
                        time.sleep(1e-5)
                    assert process_precision() == WANTED[kind]
                counts[kind] += 1

        return work

    kinds = [("high", "high"), ("highest", "high"), ("torch", "highest"), ("high", "torch"), ("high", "highest")]
    in_threads(*(worker(*each) for each in kinds))
    assert counts == {"high": 180, "highest": 60, "torch": 60}


def test_losses_in_threads_leave_the_process_as_it_was(monkeypatch):
    """Backward takes part, which autograd may run in threads of its own."""
    wrong, plain = [], Tiles.scores

    def watched(self, i, j):
        def check():
            if process_precision() != _thread.wanted:
                wrong.append((_thread.wanted, process_precision()))

        check()
        found = plain(self, i, j)
        time.sleep(1e-4)
        check()
        return found

    _thread = threading.local()
    monkeypatch.setattr(Tiles, "scores", watched)
    torch.manual_seed(0)
    x, y = torch.randn(40, 8), torch.randn(40, 8)
    leaf = x.clone().requires_grad_()
    options = tw.TileOptions(backend="torch")
    _thread.wanted = "highest"
    want = torch.autograd.grad(tw.clip_loss(leaf, y, 3.0, options=options), leaf)[0]

    def worker(kind):
        def work():
            _thread.wanted = WANTED[kind]
            options = tw.TileOptions(backend="torch", precision=kind)
            for _ in range(10):
                leaf = x.clone().requires_grad_()
                tw.clip_loss(leaf, y, 3.0, options=options).backward()
                assert_close(leaf.grad, want, 1e-2)

        return work

    in_threads(*(worker(kind) for kind in ("high", "highest", "torch", "high")))
    assert not wrong


def test_calls_of_the_same_precision_run_side_by_side():
    meet = threading.Barrier(3, timeout=LIMIT_S)

    def work():
        with matmul_precision("high"):
            meet.wait()

    in_threads(work, work, work)


def test_a_call_waits_only_for_those_before_it():
    """Two threads whose calls with one precision always overlap do not keep out a third."""
    done, first, second = threading.Event(), threading.Event(), threading.Event()

    def overlapping(mine, other):
        while not done.is_set():
            with matmul_precision("high"):
                mine.set()
                other.wait(0.01)
                other.clear()

    def third():
        for _ in range(5):
            with matmul_precision("highest"):
                assert process_precision() == "highest"
        done.set()

    in_threads(lambda: overlapping(first, second), lambda: overlapping(second, first), third)


class Refused:
    """A lock that must not be used."""

    def __enter__(self):
        raise AssertionError("took the lock")

    def __exit__(self, *_):
        raise AssertionError


def test_the_precision_of_the_process_takes_no_lock_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(kernels._turns, "moved", Refused())
    monkeypatch.setattr(torch, "set_float32_matmul_precision", Refused.__enter__)
    for kind in ("torch", "highest"):
        with matmul_precision(kind), matmul_precision("torch"), matmul_precision(kind):
            assert float32_precision() == "highest"
    with pytest.raises(AssertionError, match="took the lock"), matmul_precision("high"):
        pass
    monkeypatch.undo()
    torch.set_float32_matmul_precision("high")
    try:
        monkeypatch.setattr(kernels._turns, "moved", Refused())
        with matmul_precision("high"):
            assert float32_precision() == "high"
    finally:
        monkeypatch.undo()
        torch.set_float32_matmul_precision("highest")
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"


def test_an_error_inside_ends_the_call():
    with pytest.raises(ValueError, match="inner"), matmul_precision("highest"), matmul_precision("high"):
        raise ValueError("inner")
    with matmul_precision("high"):
        assert process_precision() == "high"
