"""Bad inputs of the drop-ins that need no package: see `tests.bad_inputs`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.bad_cache import X, learned, loss, plain, tower
from tests.integrations.test_metric_learning import metric_learning_nt_xent
from tests.integrations.test_ranking_losses import ranking_dense
from tests.oracles import clip_dense, distillation_dense, info_nce_dense, nt_xent_dense, siglip_dense
from torch import Tensor, nn

from tilewise.errors import ConfigError, DtypeError, GradientError, GroupError, RangeError, ShapeError
from tilewise.integrations import info_nce_pytorch, lightly, open_clip, verl
from tilewise.integrations import pytorch_metric_learning as metric
from tilewise.integrations.grad_cache import GradCache
from tilewise.integrations.sentence_transformers import MultipleNegativesRankingLoss as Ranking
from tilewise.integrations.sentence_transformers import hash_ids

A, B, C = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (11, 12, 13))
UNIT = [F.normalize(z.double(), dim=1) for z in (A, B, C)]
LABELS, REF = torch.arange(6) % 3, torch.arange(6) % 2
TEACHER = torch.nn.Parameter(C.clone())


def gradients(
    *inputs: Any, models: Any = 1, chunk_sizes: Any = 2, of: Any = loss, step: Any = None, **how: Any
) -> Tensor:
    """One step of GradCache. ``models``: how often the model is listed, or what is passed instead."""
    module = tower()
    listed = [module] * models if isinstance(models, int) else models(module)
    value = GradCache(listed, chunk_sizes, of, **how)(*(inputs or (X,)), **(step or {}))
    return learned(module, value)


def refused(*inputs: Any, **how: Any) -> Callable[[], object]:
    return lambda: gradients(*inputs, **how)


def info(negatives: Tensor | None = None, **settings: Any) -> Tensor:
    return info_nce_pytorch.info_nce(A, B, negatives, **settings)


def info_dense(negatives: Tensor | None = None, temperature: float = 0.1) -> Tensor:
    negatives = None if negatives is None else F.normalize(negatives.double(), dim=-1)
    return info_nce_dense(UNIT[0], UNIT[1], negatives, temperature=temperature, in_batch=negatives is None)


def pairs(labels: Tensor = LABELS, ref: Tensor | None = None, ref_labels: Tensor | None = None) -> Tensor:
    mask = ref is None
    other = (A, labels) if ref is None or ref_labels is None else (ref, ref_labels)
    return metric_learning_nt_xent(A.double(), labels, other[0].double(), other[1], 0.07, mask_self=mask)


def ranking(directions: Any = ("query_to_doc",), **settings: Any) -> Tensor:
    return Ranking(None, directions=directions, **settings).compute_loss_from_embeddings([A, B])


def ranking_of_rows(
    directions: tuple[str, ...] = ("query_to_doc",), mode: str = "joint", scale: float = 20.0
) -> Tensor:
    return ranking_dense([A.double(), B.double()], scale, directions, mode)


def token_log_probs() -> Tensor:
    return (A.double() @ B.double().T).log_softmax(1).gather(1, LABELS[:, None])[:, 0]


def loss_with_bank(features: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return lightly.NTXentLoss(memory_bank_size=(8, features)).double()


def against_bank() -> tuple[Tensor, Tensor]:
    """A loss against 8 random entries, and that of dense logits."""
    made = loss_with_bank(4)
    entries, (query, key) = made.bank.clone(), UNIT[:2]
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ entries.T], 1) / 0.5
    return made(A.double(), B.double()), F.cross_entropy(logits, torch.zeros(6).long())


def own_distance(teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive and distillation loss of OpenCLIP's teacher, and those of dense logits."""
    got = torch.stack(list(open_clip.DistillClipLoss()(A, B, 1.0, teacher, B, 1.0)))
    student, other = A.double() @ B.double().T, C.double() @ B.double().T
    parts = [distillation_dense(x, y, 0).mean() for x, y in ((student, other), (student.T, other.T))]
    entropy = [-(y.softmax(1) * y.log_softmax(1)).sum(1).mean() for y in (other, other.T)]
    return got, torch.stack([clip_dense(A.double(), B.double(), 1.0), (sum(parts) + sum(entropy)) / 2])


COSFACE = metric.CosFaceLoss(10, 4)
BAD = {
    "arcface, another distance": (
        lambda: metric.ArcFaceLoss(10, 4, distance=3),
        ConfigError,
        ("only the default distance", "got others", "use the loss of pytorch-metric-learning"),
    ),
    "cosface, pairs of a miner": (
        lambda: COSFACE(A, LABELS, indices_tuple=(LABELS, LABELS)),
        ConfigError,
        ("each embedding is compared with all classes", "indices_tuple", "use the loss of pytorch-metric-learning"),
    ),
    # GradCache
    "one module for models": (
        refused(models=lambda module: module),
        DtypeError,
        ("models is a list of modules", "Linear", "List a model twice"),
        lambda: (gradients(X, X + 1, models=2), plain(X, X + 1)),
    ),
    "no function of a loss": (
        refused(of=3),
        DtypeError,
        ("loss_fn is a function of the representations", "got 3", "Pass a function"),
        lambda: (gradients(of=lambda z: loss(z)), plain(X)),
    ),
    "chunk sizes of two models": (
        refused(chunk_sizes=[2, 2]),
        ConfigError,
        ("one number or one per model", "2 for 1 models", "Pass one number for all"),
        lambda: (gradients(chunk_sizes=2), plain(X)),
    ),
    "two inputs for one model": (
        refused(X, X + 1),
        ConfigError,
        ("one input per model", "2 inputs for 1 models", "List a model twice"),
        lambda: (gradients(X, X + 1, models=2), plain(X, X + 1)),
    ),
    "half precision without a scaler": (
        refused(fp16=True),
        ConfigError,
        ("fp16=True needs a gradient scaler", "got None", r"Pass scaler=torch\.amp\.GradScaler\(\)"),
        # Half types on a CPU are coarse: without autocast the scaler's factor must leave the gradients as they are.
        lambda: (gradients(scaler=torch.amp.GradScaler("cpu")), plain(X)),
    ),
    "no wrapped model": (
        refused(step={"no_sync_except_last": True}),
        ConfigError,
        ("needs every model wrapped", "one that is not", "leave no_sync_except_last out"),
        lambda: (gradients(), plain(X)),
    ),
    # info-nce-pytorch
    "a negative_mode": (
        lambda: info(C, negative_mode="own"),
        ConfigError,
        ("no negative_mode", "'own'", "choose one of unpaired, paired"),
        lambda: (info(C, negative_mode="unpaired"), info_dense(C)),
    ),
    "a query in a list": (
        lambda: info_nce_pytorch.info_nce(A.tolist(), B),
        DtypeError,
        ("query is a tensor", "got list", r"torch\.as_tensor\(\)"),
        lambda: (info_nce_pytorch.info_nce(torch.as_tensor(A.tolist()), B), info_dense()),
    ),
    "a temperature for negatives": (
        lambda: info(0.2),
        DtypeError,
        ("negative_keys is a tensor", "got float", "temperature by keyword, temperature="),
        lambda: (info(temperature=0.2), info_dense(temperature=0.2)),
    ),
    "unpaired negatives in three dimensions": (
        lambda: info(C[:, None]),
        ShapeError,
        ("negative_keys of 2 dimensions", r"\(6, 1, 4\)", r"\(N, M, D\) is paired"),
        lambda: (info(C[:, None], negative_mode="paired"), info_dense(C[:, None])),
    ),
    # lightly
    "two views of other samples": (
        lambda: lightly.NTXentLoss()(A, B[:5]),
        ShapeError,
        ("two views of the same samples", r"\(6, 4\) and \(5, 4\)", r"on one side only\?"),
    ),
    "a bank of other features": (
        lambda: loss_with_bank(3)(A.double(), B.double()),
        ShapeError,
        ("the memory bank has 3 features", r"\(6, 4\)", r"Use memory_bank_size=\(8, 4\)"),
        against_bank,
    ),
    "a bank of less than nothing": (
        lambda: lightly.NTXentLoss(memory_bank_size=-8),
        ConfigError,
        ("a number of entries or", "got -8", "0 is no bank"),
        lambda: (lightly.NTXentLoss(memory_bank_size=0)(A, B), nt_xent_dense(torch.cat(UNIT[:2]))),
    ),
    "gathering without a group": (
        lambda: lightly.NTXentLoss(gather_distributed=True)(A, B),
        GroupError,
        ("needs a process group", "not initialized", "or use gather_distributed=False"),
        lambda: (lightly.NTXentLoss(gather_distributed=False)(A, B), nt_xent_dense(torch.cat(UNIT[:2]))),
    ),
    # OpenCLIP
    "horovod": (
        lambda: open_clip.ClipLoss(use_horovod=True),
        ConfigError,
        ("use_horovod=True is not supported", "True", r"Use torch\.distributed, for example with torchrun"),
        lambda: (open_clip.ClipLoss()(A, B, 1.0), clip_dense(A.double(), B.double(), 1.0)),
    ),
    "a way to exchange": (
        lambda: open_clip.SigLipLoss(dist_impl="ring"),
        ConfigError,
        ("no dist_impl", "'ring'", "or None"),
        lambda: (
            open_clip.SigLipLoss(dist_impl=None)(A, B, 1.0, -2.0),
            siglip_dense(A.double(), B.double(), 1.0, -2.0),
        ),
    ),
    "a world of two": (
        lambda: open_clip.ClipLoss(world_size=2)(A, B, 1.0),
        GroupError,
        ("world_size=2", "has 1 rank", r"Call torch\.distributed\.init_process_group before the loss"),
    ),
    "a teacher that learns": (
        lambda: own_distance(TEACHER),
        GradientError,
        ("the teacher requires a gradient", "has none", r"Run it under torch\.no_grad\(\)"),
        lambda: own_distance(TEACHER.detach()),
    ),
    # PyTorch Metric Learning
    "no labels": (
        lambda: metric.NTXentLoss()(A),
        ConfigError,
        ("labels are needed", "got None", "Pass labels"),
        lambda: (metric.NTXentLoss()(A, LABELS), pairs()),
    ),
    "references without labels": (
        lambda: metric.NTXentLoss()(A, LABELS, ref_emb=B),
        ConfigError,
        ("ref_emb needs ref_labels", "got None", "Pass both"),
        lambda: (metric.NTXentLoss()(A, LABELS, ref_emb=B, ref_labels=REF), pairs(LABELS, B, REF)),
    ),
    "the same labels for references": (
        lambda: metric.NTXentLoss()(A, LABELS, ref_emb=B, ref_labels=LABELS),
        ConfigError,
        ("ref_labels is the same tensor as labels", "one sample", r"Pass labels\.clone\(\) if they are different"),
        lambda: (metric.NTXentLoss()(A, LABELS, ref_emb=B, ref_labels=LABELS.clone()), pairs(LABELS, B, LABELS)),
    ),
    "labels of floats": (
        lambda: metric.NTXentLoss()(A, LABELS.float()),
        DtypeError,
        ("labels contains integers", "float32", r"\.long\(\), if its values are whole"),
        lambda: (metric.NTXentLoss()(A, LABELS.float().long()), pairs()),
    ),
    "labels in a list": (
        lambda: metric.NTXentLoss()(A, LABELS.tolist()),
        DtypeError,
        ("labels is a tensor of integers", "list", r"torch\.as_tensor\(\)"),
        lambda: (metric.NTXentLoss()(A, torch.as_tensor(LABELS.tolist())), pairs()),
    ),
    "labels in a column": (
        lambda: metric.NTXentLoss()(A, LABELS[:, None]),
        ShapeError,
        ("labels has one entry for each row", r"\(6, 1\) for \(6, 4\)", "Reshape it"),
        lambda: (metric.NTXentLoss()(A, LABELS[:, None].reshape(6)), pairs()),
    ),
    "labels of other rows": (
        lambda: metric.NTXentLoss()(A, LABELS[:5]),
        ShapeError,
        ("labels has one entry for each row", r"\(5,\) for \(6, 4\)", r"filter drop some of its entries\?"),
    ),
    "another distance": (
        lambda: metric.NTXentLoss(distance=nn.PairwiseDistance()),
        ConfigError,
        ("distance: only cosine similarity", "default reducer", "use the loss of pytorch-metric-learning"),
    ),
    # sentence-transformers
    "ids of floats in a list": (
        lambda: hash_ids([0.5, 1.5]),
        DtypeError,
        ("ids is a list of strings or of integers", r"\[0\.5, 1\.5\]", "Pass one string or integer per row"),
        lambda: (hash_ids(["a", "b", "a"]).unique(return_inverse=True)[1].diff().abs(), torch.ones(2)),
    ),
    "ids of 71 bits": (
        lambda: hash_ids([2**70, 5]),
        RangeError,
        ("integer ids must fit into 64 bits", str(2**70), "Pass larger ones as strings"),
        lambda: (hash_ids([str(2**70), "5", str(2**70)]).unique(return_inverse=True)[1].diff().abs(), torch.ones(2)),
    ),
    "a scale of 0": (
        lambda: Ranking(None, scale=0),
        RangeError,
        ("Scale must be a positive value", "got 0", "It is 1 / temperature"),
        lambda: (ranking(scale=1 / 0.5), ranking_of_rows(scale=2.0)),
    ),
    "one direction as text": (
        lambda: ranking("query_to_doc"),
        ConfigError,
        ("directions is a tuple of names", "'query_to_doc'", r"Write directions=\('query_to_doc',\)"),
        lambda: (ranking(("query_to_doc",)), ranking_of_rows()),
    ),
    "a direction": (
        lambda: ranking(("query_to_doc", "sideways")),
        ConfigError,
        ("no direction", "'sideways'", "choose one of query_to_doc, query_to_query"),
        lambda: (ranking(("query_to_doc", "query_to_query")), ranking_of_rows(("query_to_doc", "query_to_query"))),
    ),
    "no direction with the target": (
        lambda: ranking(("doc_to_query",)),
        ConfigError,
        ("directions needs 'query_to_doc'", r"got \('doc_to_query',\)", "Add it"),
        lambda: (
            ranking(("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
            ranking_of_rows(("query_to_doc", "doc_to_query"), "per_direction"),
        ),
    ),
    "a partition_mode": (
        lambda: ranking(partition_mode="both"),
        ConfigError,
        ("no partition_mode", "'both'", "choose one of joint, per_direction"),
        lambda: (ranking(partition_mode="joint"), ranking_of_rows()),
    ),
    "directions without a target": (
        lambda: ranking(("query_to_doc", "query_to_query"), partition_mode="per_direction"),
        ConfigError,
        ("needs the target in each direction", "query_to_query", "Use partition_mode='joint'"),
        lambda: (
            ranking(("query_to_doc", "query_to_query"), partition_mode="joint"),
            ranking_of_rows(("query_to_doc", "query_to_query")),
        ),
    ),
    "documents among themselves": (
        lambda: ranking(("query_to_doc", "doc_to_doc")),
        ConfigError,
        ("doc_to_doc without doc_to_query", "not supported", "Add 'doc_to_query' to directions"),
        lambda: (
            ranking(("query_to_doc", "doc_to_query", "doc_to_doc")),
            ranking_of_rows(("query_to_doc", "doc_to_query", "doc_to_doc")),
        ),
    ),
    "another similarity": (
        lambda: Ranking(None, similarity_fct="euclid"),
        ConfigError,
        ("similarity_fct is cos_sim or dot_score", "euclid", "Only matrix products are supported"),
        lambda: (ranking(similarity_fct="cos_sim"), ranking_of_rows()),
    ),
    "one column": (
        lambda: Ranking(None).compute_loss_from_embeddings([A]),
        ShapeError,
        ("at least two columns", "got 1", r"dataset lack one\?"),
    ),
    "columns of other rows": (
        lambda: Ranking(None).compute_loss_from_embeddings([A, B[:5]]),
        ShapeError,
        ("need the same shape", r"\(5, 4\)", r"one column only\?"),
    ),
    # verl
    "a reduction of verl": (
        lambda: verl.linear_cross_entropy(A, B, LABELS, reduction="avg"),
        ConfigError,
        ("no reduction", "'avg'", "choose one of none, sum, mean"),
        lambda: (verl.linear_cross_entropy(A, B, LABELS, reduction="mean")[0], token_log_probs().mean()),
    ),
}
