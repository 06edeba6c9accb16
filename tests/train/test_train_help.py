"""Quick commands do not import torch or packages that need it. Names of the package are imported on first use."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
sys.argv = ["tilewise", *{arguments!r}]
from tilewise.train.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code or 0, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""
HEAVY = {"torch", "numpy", "transformers", "PIL", "pyarrow", "tensorboard", "safetensors", "matplotlib", "triton"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["config"], ["plan", "--help"]])
def test_commands_that_only_tell_something_do_not_wait_for_torch(arguments):
    program = PROGRAM.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert HEAVY & set(modules) == set()


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "tilewise", "--version"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout[:9]) == (0, "tilewise ")


def test_a_plain_install_is_told_what_the_command_needs():
    program = "import sys; sys.modules['typer'] = None; from tilewise.train.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert done.stderr == "tilewise: the command line needs typer. In a clone: pip install '.[train]'\n"


def test_names_come_when_they_are_used_and_are_all_there():
    program = (
        "import sys, tilewise; assert 'torch' not in sys.modules; tilewise.losses.clip; tilewise.ring; "
        "from tilewise import *; assert clip_loss is tilewise.clip_loss; assert 'info_nce' in dir(tilewise); "
        "assert all(name in vars(tilewise) for name in tilewise.__all__); tilewise.nothing"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'tilewise' has no attribute 'nothing'"
