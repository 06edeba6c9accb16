"""The command line that `heads`, `distillation` and `budgets` share: measure shapes, write results, fill in a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import RESULTS, commit_of, describe, write

Shape = tuple[int, int, int]  # tokens, features, classes
Row = dict[str, Any]


@dataclass(frozen=True)
class ShapesBenchmark:
    """A benchmark of several shapes, whose table stands between two markers of a page.

    Args:
        name: of the module, of the results and of the markers.
        shapes, quick: at full size, and those that only check that everything runs.
        run: the results of one shape, from (shape, device, turns, seconds).
        table: the results as Markdown.
        page: the page with the table.
        turns: of each method.
    """

    name: str
    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    run: Callable[[Shape, torch.device, int, float], list[Row]]
    table: Callable[[dict[str, Any]], str]
    page: Path
    turns: int = 15

    def with_table(self, page: str, report: dict[str, Any]) -> str:
        """The page with the table between its markers replaced."""
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        before, rest = page.split(begin)
        return f"{before}{begin}\n\n{self.table(report)}\n\n{end}{rest.split(end)[1]}"

    def committed(self) -> dict[str, Any]:
        """The results of the H200."""
        found: dict[str, Any] = json.loads((RESULTS / f"{self.name}-nvidia-h200.json").read_text())
        return found

    def main(self, about: str, argv: Sequence[str] | None = None) -> None:
        """Measure, or write the page."""
        parser = argparse.ArgumentParser(description=about.split("\n")[0])
        parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders that hold other libraries")
        parser.add_argument("--quick", action="store_true", help="small sizes, few turns, any device")
        parser.add_argument("--page", action="store_true", help="write the committed results into the page")
        parser.add_argument("--commit", help="the commit to record")
        parser.add_argument("--out", type=Path, help="file to write, instead of one in benchmarks/results")
        given = parser.parse_args(argv)
        if given.page:
            self.page.write_text(self.with_table(self.page.read_text(), self.committed()))
            return
        for folder in given.peers:
            sys.path.insert(0, str(folder.resolve()))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type != "cuda" and not given.quick:
            raise SystemExit("this benchmark needs a CUDA device, and torch finds none. Pass --quick to try it out")
        turns, seconds = (2, 0.2) if given.quick else (self.turns, 3.0)
        command = f"python -m benchmarks.{self.name}"
        report = describe(self.name, device, command, turns, seconds, commit=commit_of(given.commit))
        path = given.out or RESULTS / f"{self.name}-{report['device'].lower().replace(' ', '-')}.json"
        for shape in self.quick if given.quick else self.shapes:
            for row in self.run(shape, device, turns, seconds):
                report["results"].append(row)
                print(json.dumps(row), flush=True)
            write(path, report)
        print(f"wrote {path}")
