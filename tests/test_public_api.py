"""The public names and signatures are a contract: changing one is a decision, never an accident.

After such a decision: ``python -m tests.test_public_api > tests/public_api.txt``, and a line in CHANGELOG.md.
"""

import dataclasses
import difflib
import inspect
from pathlib import Path

from torch import nn

import tilewise
from tilewise import errors

SNAPSHOT = Path(__file__).with_name("public_api.txt")
CONTRACT = {  # the names that the design promises
    *("clip_loss", "siglip_loss", "info_nce", "nt_xent", "supcon_loss", "linear_cross_entropy", "linear_logsumexp"),
    *("retrieval_ranks", "recall_at_k", "TileOptions"),
    *("ClipLoss", "SigLipLoss", "InfoNCELoss", "NTXentLoss", "SupConLoss", "LinearCrossEntropyLoss"),
}


def parameters(thing) -> list[str]:
    """One line for each parameter: its kind is told by its place before or behind the star."""
    lines, starred = [], False
    for p in inspect.signature(thing).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            lines.append("    *")
            starred = True
        default = "" if p.default is p.empty else f" = {p.default!r}"
        lines.append(f"    {p.name}: {p.annotation}{default}")
    return lines


def public_api() -> str:
    lines = []
    for name in sorted(tilewise.__all__):
        thing = getattr(tilewise, name)
        if name == "__version__":
            continue
        lines.append(name)
        if dataclasses.is_dataclass(thing) or inspect.isfunction(thing):
            lines += parameters(thing)
        elif issubclass(thing, nn.Module):
            lines += [*parameters(thing.__init__), "  forward", *parameters(thing.forward)]
    for name, thing in sorted(vars(errors).items()):
        if inspect.isclass(thing):
            lines.append(f"errors.{name}({', '.join(base.__name__ for base in thing.__bases__)})")
    return "\n".join(lines) + "\n"


def test_public_api_is_the_one_agreed_on():
    want, got = SNAPSHOT.read_text().splitlines(), public_api().splitlines()
    changes = "\n".join(difflib.unified_diff(want, got, "agreed", "now", lineterm="", n=2))
    assert not changes, f"{changes}\n{__doc__}"


def test_the_design_s_names_are_there():
    assert set(tilewise.__all__) >= CONTRACT
    assert all(hasattr(tilewise, name) for name in tilewise.__all__)


def test_everything_public_is_documented():
    for name in CONTRACT:
        thing = getattr(tilewise, name)
        assert thing.__doc__
        if inspect.isfunction(thing):
            assert ">>>" in thing.__doc__, f"{name} shows no example that runs"
            for parameter in inspect.signature(thing).parameters:
                assert parameter in thing.__doc__, f"{name} does not explain {parameter}"


def test_every_error_is_also_the_one_that_python_users_expect():
    for thing in vars(errors).values():
        if inspect.isclass(thing) and thing is not errors.TilewiseError:
            assert issubclass(thing, errors.TilewiseError)
            assert issubclass(thing, ValueError | TypeError | RuntimeError)


if __name__ == "__main__":
    print(public_api(), end="")
