"""The demo: train on the icons that ship, show the results, and print the path of the report."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tilewise.train.config import RunConfig
from tilewise.train.evaluate_run import recall_table
from tilewise.train.loop import RunResult, train
from tilewise.train.run_folder import RunFolder
from tilewise.train.search import open_gallery, save_sheet, show_hits
from tilewise.train.settings import apply_overrides, build
from tilewise.train.terminal import say

QUERIES = ("shopping cart", "calendar", "arrow left", "music")

CPU_SETTINGS: dict[str, Any] = {
    "data": {"source": "icons", "augment": "icon"},
    "model": {"name": "icon", "width": 1024, "depth": 1, "embed_dim": 128, "text_buckets": 32768},
    "loss": {"name": "tilewise", "mask_same_id": True},
    "optim": {"lr": 5e-3, "weight_decay": 0.05, "warmup_steps": 6, "ema_decay": 0.9},
    "loop": {"batch_size": 4096, "chunk_size": 512, "steps": 120},
    "output": {"folder": "runs/demo", "evaluate_every": 20, "checkpoint_every": 20},
}
CUDA_SETTINGS: dict[str, Any] = {
    "model": {"width": 2048, "depth": 3, "embed_dim": 256},
    "optim": {"lr": 3e-3, "warmup_steps": 10, "ema_decay": 0.97},
    "loop": {"batch_size": 16384, "chunk_size": 4096, "steps": 200, "precision": "bf16"},
    "output": {"evaluate_every": 50, "checkpoint_every": 50},
}


def demo_config(overrides: list[str], *, cuda: bool) -> RunConfig:
    """Return the settings of the demo for this kind of machine, with overrides ``section.key=value`` applied."""
    values = {section: dict(keys) for section, keys in CPU_SETTINGS.items()}
    if cuda:
        for section, keys in CUDA_SETTINGS.items():
            values[section].update(keys)
    return build(RunConfig, apply_overrides(values, overrides))


def run_demo(console: Console, overrides: list[str]) -> RunResult:
    """Train, then show recalls, some searches and the path of the report."""
    first = os.environ.get("RANK", "0") == "0"  # under torchrun only the first rank prints
    config = demo_config(overrides, cuda=torch.cuda.is_available())
    threads = torch.get_num_threads()
    where = f"{threads} CPU thread{'s' * (threads != 1)}"
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    if first:
        say(
            console,
            f"Training an image-text model on icons: batches of {config.loop.batch_size:,} pairs in chunks of "
            f"{config.loop.chunk_size:,}, on {where}.",
        )
    result = train(config, console)
    if result.finished and first:
        show_result(console, result)
    return result


def show_result(console: Console, result: RunResult) -> None:
    """Show the results of a finished run."""
    console.print(recall_table(result.metrics))
    gallery = open_gallery(result.folder, console=console)
    found = gallery.search(QUERIES, top=10)
    for query, hits in zip(QUERIES, found, strict=True):
        show_hits(console, query, hits[:5])
    sheet = save_sheet(result.folder / "searches.png", QUERIES, found)
    say(console, f"sheet:   {sheet}")
    report = RunFolder(result.folder).report
    if report.is_file():  # output.report=false writes none
        say(console, f"report:  {report.resolve()}")
    command = own_command()
    say(console, f"search:  {command} search {result.folder} 'shopping cart'")
    say(console, f"your own images:  {command} train data.path=FOLDER")
    activate = Path(sys.prefix) / "bin" / "activate"
    if command != "tilewise" and activate.is_file():
        say(console, f"To type only tilewise, first run:  source {shown_path(activate)}")


def own_command() -> str:
    """Return the command that starts this program again in the same shell: its name if that is on the path."""
    started, found = Path(sys.argv[0]), shutil.which("tilewise")
    if found and Path(found).resolve() == started.resolve():
        return "tilewise"
    if started.name == "tilewise" and started.is_file():
        return shown_path(started)
    return "tilewise" if found else f"{shown_path(Path(sys.executable))} -m tilewise.train.cli"


def shown_path(path: Path) -> str:
    """Return a path from the current folder if it is below it. Links are kept: those of an environment matter."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
