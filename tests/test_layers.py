"""Imports point one way. The table of the design, read from the source."""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from tilewise.kernels.spec import Pair
from tilewise.kernels.tensors import KEYS, LEAVES, TABLE
from tilewise.ops.call import PairKeys

ROOT = Path(__file__).parents[1] / "src" / "tilewise"
FILES = sorted(ROOT.rglob("*.py"))
BASE = {"errors", "options", "_check", "_version"}

# Who may import whom; a part may always import itself. `kernels.spec` is the contract in which losses state what
# they want; `kernels.ranks` is the contract of retrieval, and `kernels.registry` finds a scorer for it.
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "options": {"errors"},
    "_check": {"errors", "options"},
    "kernels": BASE,
    "ring": BASE,
    "ops": BASE | {"kernels", "ring"},
    "losses": BASE | {"ops", "kernels.spec"},
    "retrieval": BASE | {"ring", "kernels.ranks", "kernels.registry"},
    "cache": BASE,
    "integrations": BASE | {"losses", "cache"},
    "tools": BASE | {"kernels", "ops", ""},  # tune: no call is a small one
    "train": BASE | {"losses", "retrieval", "cache", "ring", "tools", ""},
    "": BASE | {"losses", "ops", "retrieval"},  # tilewise/__init__.py
    "__main__": {"train"},
}
IMPLEMENTATIONS = {"kernels.torch_impl", "kernels.triton_impl"}
# Packages that only some parts may import, at the top of a file or inside of a function.
OPTIONAL = {
    "triton": {"kernels.triton_impl"},
    "torchvision": set(),
    "transformers": {"train", "integrations"},
    "huggingface_hub": {"train"},
    "webdataset": {"train"},
    "pyarrow": {"train"},
    "PIL": {"train"},
    "typer": {"train"},
    "rich": {"train", "retrieval", "tools"},
    "matplotlib": {"train"},
    "tensorboard": {"train"},
    "safetensors": {"train"},
    "numpy": {"train", "integrations"},
    "sentence_transformers": {"integrations"},
    "open_clip": {"integrations"},
}


def dotted(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@functools.cache
def imports(source: str) -> frozenset[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(source: str) -> set[str]:
    """Modules of tilewise, without the prefix; "" is the package itself."""
    names = set()
    for name in imports(source):
        inner = name.removeprefix("tilewise").removeprefix(".")
        if name == "tilewise" or (name.startswith("tilewise.") and is_module(inner)):
            names.add(inner)
    if any(name and is_module(name) and "." not in name for name in names):
        names.discard("")  # `from tilewise import _check` names a module, not the package
    return names


def part_of(module: str) -> str:
    return module.split(".")[0]


def belongs(module: str, names: set[str]) -> bool:
    return any(module == name or (name and module.startswith(f"{name}.")) for name in names)


def trespasses(module: str, source: str) -> set[str]:
    """What this module imports and may not."""
    part = part_of(module)
    wrong = {name for name in own_imports(source) if part_of(name) != part and not belongs(name, ALLOWED[part])}
    # The name of a package is imported along with the modules in it.
    wrong = {name for name in wrong if not any(allowed.startswith(f"{name}.") for allowed in ALLOWED[part])}
    if module != "kernels.registry":
        inside = {name for name in IMPLEMENTATIONS if belongs(module, {name})}
        wrong |= {name for name in own_imports(source) if belongs(name, IMPLEMENTATIONS - inside)}
    for package, places in OPTIONAL.items():
        if belongs(package, {name.split(".")[0] for name in imports(source)}) and not belongs(module, places):
            wrong.add(package)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_imports(path):
    assert part_of(dotted(path)) in ALLOWED, "a new part needs a line in the table"
    assert trespasses(dotted(path), path.read_text()) == set()


def import_graph() -> dict[str, set[str]]:
    """The modules that each file imports, those inside functions included; a package stands for its ``__init__``."""
    graph = {}
    for path in FILES:
        module, found = dotted(path), own_imports(path.read_text()) - {""}
        # `from package import module` names both; the package itself is only meant if nothing of it is named.
        graph[module] = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
        graph[module].discard(module)
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """A chain of imports that comes back to its start, or []."""
    done: set[str] = set()

    def visit(module: str, chain: list[str]) -> list[str]:
        if module in chain:
            return [*chain[chain.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if found := visit(other, [*chain, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def test_imports_are_acyclic_between_files():
    assert cycle_in(import_graph()) == []


def test_a_cycle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_only_the_registry_names_implementations():
    users = {
        module for module, found in import_graph().items() if any(belongs(name, IMPLEMENTATIONS) for name in found)
    }
    outside = {module for module in users if not belongs(module, IMPLEMENTATIONS)}
    assert outside == {"kernels.registry"}


def test_operators_and_losses_know_no_backend_by_name():
    for path in FILES:
        if part_of(dotted(path)) in ("ops", "losses", "ring", "retrieval"):
            text = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not text & {"triton", "torch"}, path


def test_there_are_few_autograd_functions_and_two_operators_for_losses():
    """Each operator with its backward and its directional derivatives. One function only raises an error.

    One is the base class of the others. Two are for small batches, a scalar loss and statistics, with as little work as
    possible on the host. One normalizes a large classifier, one takes this rank's part of a DTensor.
    """
    functions, operators = set(), set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in node.bases):
                functions.add(f"{dotted(path)}.{node.name}")
    known = {"ops.autograd._Eager", "ops.paired_scores._OwnScores", "ops.registered._FirstDerivativeOnly"}
    known |= {"ops.call.Function", "ops.small.SmallLoss", "ops.small.SmallStats"}
    known |= {"losses.margin_softmax._UnitRows", "ops.distributed.dtensors._Local"}
    assert functions == known | {name for name in functions if part_of(name) not in ("ops", "losses", "kernels")}
    for name in ("pair_stats", "pair_loss"):
        operators |= {name, f"{name}_backward", f"{name}_jvp"}

    known = {name for name in dir(torch.ops.tilewise) if name.startswith("pair_")}
    assert known <= operators
    assert all(hasattr(torch.ops.tilewise, name) for name in operators)


def lists_of_pair_tensors(source):
    """Lines of lists with three names of a pair's tensors; ``a`` and ``b`` are names of other things, too."""
    names = {tensor.name for tensor in TABLE} - {"a", "b"}
    for node in ast.walk(ast.parse(source)):
        parts = getattr(node, "elts", ())
        if len({part.value for part in parts if isinstance(part, ast.Constant)} & names) >= 3:
            yield node.lineno


def test_only_the_table_lists_the_tensors_of_a_pair():
    """Except for parameters of kernels. A new tensor is a line of the table, and a field of `Pair` and `PairKeys`."""
    found = {dotted(path) for path in FILES if [*lists_of_pair_tensors(path.read_text())]}
    assert {name for name in found if not name.endswith("kernels")} == {"kernels.triton_impl.launch"}
    assert [*lists_of_pair_tensors("x = ['pick', 'bias', 'row_key']\ny = ('a', 'b', 'scale')")] == [1]
    assert PairKeys._fields == KEYS
    names = [field.name for field in dataclasses.fields(Pair) if not field.kw_only]
    assert tuple(names) == (*LEAVES, *KEYS) == tuple(tensor.name for tensor in TABLE)


def test_only_the_executor_reads_addresses():
    """Others ask only whether an address is aligned: of tensors before a call, and for the key of a compiled kernel."""
    readers, folder = set(), ROOT / "kernels" / "triton_impl"
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(part, ast.Attribute) and part.attr == "data_ptr" for part in ast.walk(node)
            ):
                readers.add(f"{path.relative_to(folder)}:{node.name}")
    assert {name for name in readers if not name.startswith(("program.py", "buffers.py"))} == {
        "scores.py:is_aligned",
        "launch.py:_kind",
    }


def test_steps_are_launched_by_the_executor_only():
    """Two passes and one pass add steps to a program. Only the filter, ranks and search launch at once, and round."""
    found, folder = {}, ROOT / "kernels" / "triton_impl"
    for path in folder.rglob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text())):
            if not isinstance(owner, ast.FunctionDef):
                continue
            calls = [node.func for node in ast.walk(owner) if isinstance(node, ast.Call)]
            if any(isinstance(call, ast.Name) and call.id in ("launch", "compiled_launch") for call in calls):
                found.setdefault(str(path.relative_to(folder)), set()).add(owner.name)
    assert found.keys() == {"launch.py", "program.py", "ranks.py", "nearest.py", "filtered/forward.py", "tf32.py"}
    assert not any("__init__" in names for names in found.values())


def test_only_the_ring_moves_tensors():
    """Sending and reducing happens in `ring` and in the trainer; a kernel or a loss never sees a rank."""
    movers = {"isend", "irecv", "all_reduce", "all_gather", "batch_isend_irecv", "broadcast", "all_gather_into_tensor"}
    for path in FILES:
        if part_of(dotted(path)) in ("kernels", "losses", "retrieval", "_check", "options"):
            used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not used & (movers - {"broadcast"}), path


@pytest.mark.parametrize(
    "module, source",
    [
        ("kernels.spec", "from tilewise.losses.clip import clip_loss"),
        ("kernels.spec", "import triton"),
        ("kernels.spec", "def f():\n    from triton import language"),
        ("losses.clip", "from tilewise.kernels.torch_impl.backend import TorchBackend"),
        ("ops.route", "from tilewise.kernels.triton_impl.backend import TritonBackend"),
        ("kernels.ranks", "def f():\n    from tilewise.kernels.torch_impl import ranks"),
        ("kernels.torch_impl.tiles", "from tilewise.kernels.triton_impl import sizes"),
        ("losses.clip", "from tilewise.kernels.registry import choose_backend"),
        ("losses.clip", "from tilewise import ring"),
        ("ring.blocks", "from tilewise.kernels.spec import Stats"),
        ("cache.step", "import tilewise.losses.clip"),
        ("cache.step", "from tilewise import clip_loss"),
        ("ops.autograd", "from tilewise.losses import clip"),
        ("retrieval", "from tilewise.train.cli import main"),
        ("train.loop", "import torchvision"),
        ("errors", "from tilewise.options import TileOptions"),
    ],
)
def test_the_test_sees_trespassers(module, source):
    assert trespasses(module, source)


def test_few_constants_are_patched():
    """Thresholds belong into `Limits`, which the fixture `set_limits` replaces as a whole. This number only falls."""
    calls = (node for path in ROOT.parents[1].glob("tests/**/*.py") for node in ast.walk(ast.parse(path.read_text())))
    patches = [
        ast.unparse(node.args[1])
        for node in calls
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr") and len(node.args) > 1
    ]
    assert "'TILE_ROWS'" in patches
    assert sum(name.strip("'\"").isupper() for name in patches) <= 103
