"""Compare the drop-ins with the loss modules of the packages: loss and gradients, as a table.

    pip download --no-deps -d wheels open_clip_torch lightly pytorch-metric-learning \\
        info-nce-pytorch sentence-transformers
    python -m tools.drop_ins.compare wheels

Only the modules of the losses are imported, and not the __init__ files of the packages, which import models and data
sets. So the packages need not be installed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH = 192, 48


@dataclass(frozen=True)
class Case:
    """One loss, of the package and ours, on the same inputs."""

    package: str
    what: str
    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    inputs: tuple[Any, ...]  # gradients are compared for tensors that require one


def unpack(folder: Path, into: Path) -> dict[str, str]:
    """Unpack every wheel. Returns the versions by name."""
    versions = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        versions[name] = version
        zipfile.ZipFile(wheel).extractall(into)
    return versions


def without_init(root: Path, *names: str) -> None:
    """Register packages whose submodules can be imported without running their __init__."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def stand_in(name: str, **content: Any) -> None:
    """Register a module that has only these names."""
    module = types.ModuleType(name)
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[name] = module


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def unit(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1).requires_grad_()


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def open_clip_cases(root: Path) -> Iterator[Case]:
    from tilewise.integrations import open_clip as ours

    without_init(root, "open_clip")
    theirs = importlib.import_module("open_clip.loss")
    pair = (unit(ROWS, WIDTH), unit(ROWS, WIDTH))
    yield Case("open_clip_torch", "ClipLoss", theirs.ClipLoss(), ours.ClipLoss(), (*pair, scalar(14.3)))
    yield Case("open_clip_torch", "ClipLoss, scale 100", theirs.ClipLoss(), ours.ClipLoss(), (*pair, scalar(100.0)))
    sigmoid = (*pair, scalar(10.0), scalar(-10.0))
    yield Case("open_clip_torch", "SigLipLoss", theirs.SigLipLoss(), ours.SigLipLoss(), sigmoid)


def lightly_cases(root: Path) -> Iterator[Case]:
    from tilewise.integrations.lightly import NTXentLoss

    without_init(root, "lightly", "lightly.loss", "lightly.models", "lightly.models.modules", "lightly.utils")
    stand_in("lightly.models.utils", concat_all_gather=None)
    sys.modules["lightly.models"].utils = sys.modules["lightly.models.utils"]  # type: ignore[attr-defined]
    theirs = importlib.import_module("lightly.loss.ntx_ent_loss").NTXentLoss
    views = (normal(ROWS, WIDTH), normal(ROWS, WIDTH))
    for temperature in (0.5, 0.1):
        yield Case("lightly", f"NTXentLoss({temperature})", theirs(temperature), NTXentLoss(temperature), views)
    bank = theirs(0.1, (3 * ROWS // 2, WIDTH))
    own = NTXentLoss(0.1, (3 * ROWS // 2, WIDTH))
    own.bank = bank.memory_bank.bank.clone()

    def thrice(loss: nn.Module) -> Callable[..., Tensor]:
        def run(a: Tensor, b: Tensor) -> Tensor:
            fresh = copy.deepcopy(loss).to(a.dtype)  # the bank changes between the batches
            total: Tensor = fresh(a, b) + fresh(a.flip(0), b.flip(0)) + fresh(b, a)
            return total

        return run

    yield Case("lightly", "NTXentLoss, memory bank, three batches", thrice(bank), thrice(own), views)


def metric_learning_cases(root: Path) -> Iterator[Case]:
    from tilewise.integrations import pytorch_metric_learning as ours

    base = "pytorch_metric_learning"
    without_init(root, base, f"{base}.losses")
    for name in [name for name in ("scipy", "tqdm") if importlib.util.find_spec(name) is None]:
        stand_in(name, stats=None, tqdm=None)  # imported by the package but not used here
        stand_in(f"{name}.stats")
    nt_xent = importlib.import_module(f"{base}.losses.ntxent_loss").NTXentLoss
    supcon = importlib.import_module(f"{base}.losses.supcon_loss").SupConLoss
    z, ref = normal(ROWS, WIDTH), normal(ROWS + 7, WIDTH)
    twins = torch.arange(ROWS // 2).repeat(2)
    groups, ref_groups = torch.randint(0, 40, (ROWS,)), torch.randint(0, 40, (ROWS + 7,))
    yield Case(base, "NTXentLoss, two of a label", nt_xent(), ours.NTXentLoss(), (z, twins))
    yield Case(base, "NTXentLoss, any labels", nt_xent(), ours.NTXentLoss(), (z, groups))
    yield Case(base, "NTXentLoss, ref_emb", nt_xent(), ours.NTXentLoss(), (z, groups, None, ref, ref_groups))
    yield Case(base, "SupConLoss, any labels", supcon(), ours.SupConLoss(), (z, groups))
    yield Case(base, "SupConLoss, ref_emb", supcon(), ours.SupConLoss(), (z, groups, None, ref, ref_groups))


def info_nce_cases(root: Path) -> Iterator[Case]:
    from tilewise.integrations.info_nce_pytorch import InfoNCE

    theirs = importlib.import_module("info_nce").InfoNCE
    query, key = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    yield Case("info_nce_pytorch", "InfoNCE, in batch", theirs(), InfoNCE(), (query, key))
    yield Case("info_nce_pytorch", "InfoNCE, unpaired", theirs(), InfoNCE(), (query, key, normal(77, WIDTH)))
    paired = {"negative_mode": "paired"}
    yield Case(
        "info_nce_pytorch", "InfoNCE, paired", theirs(**paired), InfoNCE(**paired), (query, key, normal(ROWS, 5, WIDTH))
    )


def sentence_cases(root: Path) -> Iterator[Case]:
    from tilewise.integrations.sentence_transformers import MultipleNegativesRankingLoss

    base = "sentence_transformers"
    without_init(root, base, f"{base}.base", f"{base}.base.losses", f"{base}.sentence_transformer")
    without_init(root, f"{base}.sentence_transformer.losses")
    stand_in(f"{base}.sentence_transformer.model", SentenceTransformer=nn.Module)
    stand_in(f"{base}.base.losses.merged_forward", embed_columns=None)

    def cos_sim(a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.normalize(a, dim=1) @ nn.functional.normalize(b, dim=1).T

    stand_in(
        f"{base}.util",
        **{"all_gather_with_grad": None, "batch_to_device": None, "cos_sim": cos_sim},
        **{"get_rank": lambda: 0, "similarity_fct_name": str},
    )
    theirs = importlib.import_module(f"{base}.sentence_transformer.losses.multiple_negatives_ranking")
    columns = [normal(ROWS, WIDTH) for _ in range(4)]
    four = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    for what, count, settings in (
        ("pairs", 2, {}),
        ("two hard negatives", 4, {}),
        ("both directions, each its softmax", 4, {"directions": four[::2], "partition_mode": "per_direction"}),
        ("both directions, one softmax", 3, {"directions": four[::2]}),
        ("all four directions, one softmax", 4, {"directions": four}),
    ):
        wanted = theirs.MultipleNegativesRankingLoss(nn.Identity(), **settings)
        own = MultipleNegativesRankingLoss(nn.Identity(), **settings)
        yield Case(
            base,
            f"MultipleNegativesRankingLoss, {what}",
            lambda *e, loss=wanted: loss.compute_loss_from_embeddings(list(e), None),
            lambda *e, loss=own: loss.compute_loss_from_embeddings(list(e), None),
            tuple(columns[:count]),
        )


class Tokenizer:
    """The guide and the model have the same one."""

    def get_vocab(self) -> dict[str, int]:
        """No words, because there are no texts."""
        return {}

    def batch_decode(self, rows: Any) -> list[str]:
        """No texts."""
        return []


class Given(nn.Module):
    """A model whose features are the embeddings."""

    tokenizer, max_seq_length = Tokenizer(), 1

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features."""
        return features


def gist_cases(root: Path) -> Iterator[Case]:
    """After `sentence_cases`, whose stand-ins it needs."""
    from tilewise.integrations.sentence_transformers import GISTEmbedLoss

    base = "sentence_transformers"
    stand_in("transformers", PreTrainedTokenizerBase=Tokenizer)
    stand_in(f"{base}.sentence_transformer.modules", StaticEmbedding=type(None))
    theirs = importlib.import_module(f"{base}.sentence_transformer.losses.gist_embed")
    torch.manual_seed(1)
    columns, guides = [[normal(ROWS, WIDTH) for _ in range(3)] for _ in range(2)]

    class Guide(Given):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return {"sentence_embedding": guides[features["column"]].to(features["sentence_embedding"].dtype)}

    def taught(kind: Any, **settings: Any) -> Callable[..., Tensor]:
        loss = kind(Given(), Guide(), **settings)
        return lambda *e: loss([{"sentence_embedding": x, "column": i} for i, x in enumerate(e)], None)

    # The package's own function imports transformers, which a stand-in replaces here.
    theirs.embed_columns = lambda model, features: [model(part)["sentence_embedding"] for part in features]
    relative: dict[str, Any] = {"margin_strategy": "relative", "margin": 0.2, "contrast_anchors": False}
    for what, count, settings in (("pairs", 2, {}), ("hard negatives", 3, {}), ("relative margin", 3, relative)):
        both = (taught(kind, **settings) for kind in (theirs.GISTEmbedLoss, GISTEmbedLoss))
        yield Case(base, f"GISTEmbedLoss, {what}", *both, tuple(columns[:count]))


def gradients(loss: Callable[..., Any], inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss, and all gradients in one vector."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_()

    given = [convert(value) for value in inputs]
    result = loss(*given)
    learned = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    grads = torch.autograd.grad(result, learned)
    return result.detach().double(), torch.cat([grad.flatten().double() for grad in grads])


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def open_clip_pairs_of_losses(root: Path) -> Iterator[Case]:
    """Losses that return two values. Their sum is compared."""
    from tilewise.integrations import open_clip as ours

    theirs = sys.modules["open_clip.loss"]
    pair = (unit(ROWS, WIDTH), unit(ROWS, WIDTH))
    labels = torch.randint(0, 30, (ROWS, 7))

    def captioned(loss: nn.Module) -> Callable[..., Tensor]:
        return lambda a, b, logits, scale: sum(loss(a, b, logits, labels, scale))

    coca = (*pair, normal(ROWS, 7, 30), scalar(14.3))
    weights = (2.0, 1.0)
    yield Case(
        "open_clip_torch", "CoCaLoss", *map(captioned, (theirs.CoCaLoss(*weights), ours.CoCaLoss(*weights))), coca
    )
    teacher = (unit(ROWS, 2 * WIDTH).detach(), unit(ROWS, 2 * WIDTH).detach())

    def taught(loss: nn.Module) -> Callable[..., Tensor]:
        return lambda a, b, scale: sum(loss(a, b, scale, *(side.to(a.dtype) for side in teacher), 20.0))

    both = map(taught, (theirs.DistillClipLoss(), ours.DistillClipLoss()))
    yield Case("open_clip_torch", "DistillClipLoss", *both, (*pair, scalar(14.3)))


def main(folder: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        versions = unpack(Path(folder), root)
        sys.path.insert(0, place)
        print("| package | loss | value | loss, float64 | gradients, float64 | gradients, float32 (theirs) |")
        print("|---|---|---|---|---|---|")
        first = (open_clip_cases, lightly_cases, metric_learning_cases, info_nce_cases, sentence_cases)
        for cases in (
            *first,
            open_clip_pairs_of_losses,
            gist_cases,
        ):  # last, so that the random numbers of the others do not change
            for case in cases(root):
                loss, grad = gradients(case.ours, case.inputs, torch.float64)
                wanted, wanted_grad = gradients(case.theirs, case.inputs, torch.float64)
                half = [
                    error(gradients(f, case.inputs, torch.float32)[1], wanted_grad) for f in (case.ours, case.theirs)
                ]
                print(
                    f"| {case.package} {versions[case.package]} | {case.what} | {wanted.item():.4f} | "
                    f"{error(loss, wanted):.0e} | {error(grad, wanted_grad):.0e} | {half[0]:.0e} ({half[1]:.0e}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1])
