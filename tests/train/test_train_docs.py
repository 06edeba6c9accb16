"""Examples, settings, commands and options in the documentation exist in the code."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from tilewise.train.cli import app
from tilewise.train.config import ModelName, load_config
from tilewise.train.demo import CPU_SETTINGS
from tilewise.train.settings import to_dict

ROOT = Path(__file__).resolve().parents[2]
DOCS = ("training.md", "data.md", "checkpoints.md", "command-line.md")
FILES = ("md", "py", "toml", "safetensors")
NAMES = (
    "train",
    "evaluate",
    "search",
    "embed",
    "mine",
    "report",
    "export",
    "status",
    "demo",
    "config",
    "tune",
    "doctor",
)
COMMANDS = [[name, "--help"] for name in NAMES]
COMMANDS += [["plan", "--help"], ["plan", "lm", "--help"], ["plan", "clip", "--help"], ["--help"]]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path):
    load_config(path)


def test_the_icons_example_is_the_demo():
    made, demo = to_dict(load_config(ROOT / "examples" / "icons.toml")), to_dict(load_config(None))
    for section, keys in CPU_SETTINGS.items():
        demo[section] |= keys
    made["output"].pop("folder")
    demo["output"].pop("folder")
    made["data"].pop("augment"), demo["data"].pop("augment")
    made["model"].pop("embed_dim"), demo["model"].pop("embed_dim")
    assert made == demo


def test_settings_in_the_documentation_exist():
    values = to_dict(load_config(None))
    for name in DOCS:
        text = (ROOT / "docs" / "concepts" / name).read_text()
        for section, key in re.findall(r"\b(data|model|loss|optim|loop|output)\.([a-z_]+)\b", text):
            if key not in FILES:
                assert key in values[section], f"{name}: {section}.{key}"


def words_of_the_code():
    """Yield all text in the training code: messages, help, docstrings."""
    for path in sorted((ROOT / "src" / "tilewise" / "train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def unknown_names(texts):
    values = to_dict(load_config(None))
    options = {
        name for command in COMMANDS for name in re.findall(r"--[a-z-]+", CliRunner().invoke(app, command).output)
    }
    for where, text in texts:  # the style sheet of the report has --names that are not options
        for section, key in re.findall(r"(?<![\w./-])(data|model|loss|optim|loop|output)\.([a-z_]+)\b", text):
            if key not in values[section] and key not in FILES:
                yield f"{where}: {section}.{key}"
        for name in re.findall(r"(?<![\w(-])--[a-z][a-z-]+(?![\w:-])", text):
            if name not in options:
                yield f"{where}: {name}"


def test_messages_name_settings_and_options_that_exist():
    assert list(unknown_names(words_of_the_code())) == []
    wrong = [("x.py", "Set loop.batchsize, model.name or --pair; see model.safetensors and --pairs")]
    assert list(unknown_names(wrong)) == ["x.py: loop.batchsize", "x.py: --pair"]


def test_every_model_is_documented():
    text = (ROOT / "docs" / "concepts" / "training.md").read_text()
    assert all(f"`{name}`" in text for name in get_args(ModelName))


def test_commands_in_the_documentation_exist():
    text = "".join((ROOT / "docs" / "concepts" / name).read_text() for name in DOCS)
    for command in set(re.findall(rf"tilewise ({'|'.join(NAMES)})\b", text)):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
