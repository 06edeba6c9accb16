"""Run a command as the shell does, in this process: exit code, output and errors."""

import sys
import threading

import pytest

from tilewise.train import cli


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Return a function that takes the arguments of a command."""
    monkeypatch.setattr("tilewise.train.signals.end_on_signals", lambda: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # `main` sets it, and this restores it

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tilewise", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def usual_recursion():
    """Python's own limit of recursion, which other libraries raise when they are imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture
def refusal(run_main):
    """Return a function that takes the arguments of a command that fails, and returns its one sentence."""

    def run(*arguments):
        code, _, errors = run_main(*arguments)
        assert code in (1, 2), (code, errors)
        assert errors.startswith("tilewise: "), errors
        assert errors.count("\n") == 1, errors
        return errors

    return run
