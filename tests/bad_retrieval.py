"""Bad inputs of ranks, recall and search: see `tests.bad_inputs`."""

import tempfile

import torch
import torch.nn.functional as F
from tests.bad_inputs import jagged
from torch import Tensor

import tilewise as tw
from tilewise.errors import BackendError, ConfigError, DeviceError, DtypeError, RangeError, ShapeError
from tilewise.retrieval import write_trec

X, Y = (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)) for size in (3, 5))
INDEX, FIVE = torch.tensor([0, 1, 2]), torch.arange(5)
IDS, OTHERS = torch.tensor([3.5, 7.25, -1.0]), torch.tensor([7.25, 7.25, 3.5, 0.0, 3.75])  # of queries and gallery
MASK = torch.tensor([[True, False, False, True, False]] * 3)
LARGE, SMALL = torch.full((1, 2**16), 0.5), torch.full((1, 2**16), 0.25)
TABLE = torch.tensor([0, 3, 12, -1])


def scores() -> Tensor:
    return X.double() @ Y.double().T


def ranks(right: Tensor = INDEX, scores_nm: Tensor | None = None) -> Tensor:
    """The rank of one right answer of each query."""
    s = scores() if scores_nm is None else scores_nm
    return (s > s.gather(1, right[:, None])).sum(1)


def best_ranks(right_nm: Tensor) -> Tensor:
    """The rank of the best of several right answers; -1 for none."""
    best = scores().masked_fill(~right_nm, -torch.inf).amax(1, keepdim=True)
    return torch.where(right_nm.any(1), (scores() > best).sum(1), -1)


def nearest(k: int = 2, hidden: Tensor | None = None) -> Tensor:
    s = scores() if hidden is None else scores().masked_fill(hidden, -torch.inf)
    found = s.topk(k)
    return torch.where(found.values > -torch.inf, found.indices, -1)


def metric(ranks: Tensor, relevance: Tensor) -> Tensor:
    return torch.tensor(tw.retrieval_metrics(ranks, relevance)["mrr"])


def first_items(names: list[str]) -> Tensor:
    """The items that a run of TREC names first."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = write_trec(folder, names, list("01234"), tw.nearest(X, Y, 1), INDEX)
        return torch.tensor([int(line.split()[2]) for line in run.read_text().splitlines()])


def numbered(query_ids: Tensor, gallery_ids: Tensor) -> dict[str, Tensor]:
    """As the message says."""
    both = torch.unique(torch.cat([query_ids, gallery_ids]), return_inverse=True)[1]
    queries, gallery = both.split([len(query_ids), len(gallery_ids)])
    return {"query_ids": queries, "gallery_ids": gallery}


BAD = {
    "width": (
        lambda: tw.retrieval_ranks(X, Y[:, :3]),
        ShapeError,
        ("same width", r"\(3, 4\) and \(5, 3\)", r"projection head\?"),
    ),
    "a gallery transposed": (
        lambda: tw.retrieval_ranks(X, Y.T.contiguous()),
        ShapeError,
        ("same width", r"\(3, 4\) and \(4, 5\)", "Pass gallery.T"),
        lambda: (tw.retrieval_ranks(X, Y.T.contiguous().T), ranks()),
    ),
    "one query": (
        lambda: tw.nearest(X[0], Y, 2),
        ShapeError,
        ("same width", r"\(4,\) and \(5, 4\)", r"matrix with \.unsqueeze\(0\)"),
        lambda: (tw.nearest(X[0].unsqueeze(0), Y, 2).indices, nearest()[:1]),
    ),
    "queries in two dimensions": (
        lambda: tw.nearest(X[None], Y, 2),
        ShapeError,
        ("same width", r"\(1, 3, 4\) and \(5, 4\)", r"two with \.flatten\(0, -2\)"),
        lambda: (tw.nearest(X[None].flatten(0, -2), Y, 2).indices, nearest()),
    ),
    "types differ": (
        lambda: tw.retrieval_ranks(X, Y.double()),
        DtypeError,
        ("one type", "float32 and torch.float64", r"Convert one of them with \.to\(\)"),
        lambda: (tw.retrieval_ranks(X.to(torch.float64), Y.double()), ranks()),
    ),
    "features of integers": (
        lambda: tw.retrieval_ranks((9 * X).long(), (9 * Y).long()),
        DtypeError,
        ("one type", "int64 and torch.int64", r"Convert both with \.float\(\)"),
        lambda: (
            tw.retrieval_ranks((9 * X).long().float(), (9 * Y).long().float()),
            ranks(scores_nm=((9 * X).long() @ (9 * Y).long().T).double()),
        ),
    ),
    "queries in a list": (
        lambda: tw.retrieval_ranks(X.tolist(), Y),
        DtypeError,
        ("queries is a tensor", "got list", r"torch\.as_tensor\(\)"),
        lambda: (tw.retrieval_ranks(torch.as_tensor(X.tolist()), Y), ranks()),
    ),
    "rows in a list": (
        lambda: tw.retrieval_ranks(list(X), Y),
        DtypeError,
        ("queries is a tensor", "got list", r"torch\.stack\(\)"),
        lambda: (tw.retrieval_ranks(torch.stack(list(X)), Y), ranks()),
    ),
    "no queries": (
        lambda: tw.nearest(None, Y, 2),
        DtypeError,
        ("queries is a tensor", "NoneType", "Pass a tensor"),
        lambda: (tw.nearest(X, Y, 2).indices, nearest()),
    ),
    "a nested gallery": (
        lambda: tw.nearest(X, jagged(Y), 2),
        DtypeError,
        ("gallery is one dense tensor", "nested", r"torch\.cat\(list\(gallery\.unbind\(\)\)\)"),
        lambda: (tw.nearest(X, torch.cat(list(jagged(Y).unbind())), 2).indices, nearest()),
    ),
    "a gallery elsewhere": (
        lambda: tw.retrieval_ranks(X, Y.to("meta")),
        DeviceError,
        ("one device", "cpu and meta", "Move"),
    ),
    "features without values": (
        lambda: tw.retrieval_ranks(X.to("meta"), Y.to("meta")),
        DeviceError,
        ("queries and gallery need values", "meta", "Use another device"),
        lambda: (tw.retrieval_ranks(X, Y), ranks()),
    ),
    "features of NaN": (
        lambda: tw.retrieval_ranks(X, torch.where(FIVE[:, None] == 4, torch.nan, Y)),
        RangeError,
        ("must be finite", "nan", "Remove the rows with NaN or infinity"),
        lambda: (tw.retrieval_ranks(X, Y[:4]), ranks(scores_nm=scores()[:, :4])),
    ),
    "scores that overflow": (
        lambda: tw.retrieval_ranks(1e20 * X, 1e20 * Y),
        RangeError,
        ("no score may overflow", r"e\+20", r"Divide each by its \.abs\(\)\.max\(\)"),
        lambda: (tw.retrieval_ranks(*(z / z.abs().max() for z in (1e20 * X, 1e20 * Y))), ranks()),
    ),
    "too few items": (
        lambda: tw.retrieval_ranks(Y, X),
        ShapeError,
        ("item i answers query i", "5 queries and 3 items", "Pass positives=..., or query_ids=..."),
        lambda: (tw.retrieval_ranks(Y, X, FIVE % 3), ranks(FIVE % 3, scores().T)),
    ),
    "positives beyond the gallery": (
        lambda: tw.retrieval_ranks(X, Y, INDEX + 3),
        RangeError,
        ("indices from 0 to 4", "3 to 5", r"whole gallery\?"),
    ),
    "positives below -1": (
        lambda: tw.retrieval_ranks(X, Y, INDEX - 2),
        RangeError,
        ("or -1 for none", "-2 to 0", r"whole gallery\?"),
    ),
    "positives of no items": (
        lambda: tw.retrieval_ranks(X, Y[:0], INDEX),
        RangeError,
        ("-1 for none", "0 to 2", r"Is the gallery empty\?"),
    ),
    "positives of other queries": (
        lambda: tw.retrieval_ranks(X, Y, torch.arange(4)),
        ShapeError,
        ("one row per query", r"\(4,\)", r"drop some queries\?"),
    ),
    "positives of floats": (
        lambda: tw.retrieval_ranks(X, Y, INDEX.float()),
        DtypeError,
        ("positives holds integers", "float32", r"\.long\(\), if its values are whole"),
        lambda: (tw.retrieval_ranks(X, Y, INDEX.float().long()), ranks()),
    ),
    "positives in a list": (
        lambda: tw.retrieval_ranks(X, Y, [0, 1, 2]),
        DtypeError,
        ("positives is a tensor of integers, or a bool mask", "list", r"torch\.as_tensor\(\)"),
        lambda: (tw.retrieval_ranks(X, Y, torch.as_tensor([0, 1, 2])), ranks()),
    ),
    "positives elsewhere": (
        lambda: tw.retrieval_ranks(X, Y, INDEX.to("meta")),
        DeviceError,
        ("positives and queries need one device", "meta and cpu", "Move"),
    ),
    "a mask of queries": (
        lambda: tw.retrieval_ranks(X, Y, MASK[:, 0]),
        ShapeError,
        (r"each query and item, \(3, 5\)", r"\(3,\)", "Pass gallery indices instead"),
        lambda: (tw.retrieval_ranks(X, Y, torch.zeros(3).long()), ranks(torch.zeros(3).long())),
    ),
    "a mask of other items": (
        lambda: tw.nearest(X, Y, 2, exclude=INDEX[:, None] > INDEX),
        ShapeError,
        (r"each query and item, \(3, 5\)", r"\(3, 3\)", "padded with -1"),
        lambda: (
            tw.nearest(X, Y, 2, exclude=torch.tensor([[-1, -1], [0, -1], [0, 1]])).indices,
            nearest(hidden=INDEX[:, None] > FIVE),
        ),
    ),
    "an excluded answer": (
        lambda: tw.retrieval_ranks(X, Y, exclude=torch.tensor([1, 1, 0])),
        RangeError,
        ("query 1 excludes its own right answer", r"positives \[1\], exclude \[1\]", "Remove it from one of them"),
        lambda: (
            tw.retrieval_ranks(X, Y, exclude=torch.tensor([1, -1, 0])),
            ranks(scores_nm=scores().masked_fill(torch.tensor([1, -1, 0])[:, None] == FIVE, -torch.inf)),
        ),
    ),
    "half of the ids": (
        lambda: tw.retrieval_ranks(X, Y, query_ids=INDEX),
        ShapeError,
        ("by query_ids and gallery_ids together", "gallery_ids missing", "Pass one of the two"),
        lambda: (
            tw.retrieval_ranks(X, Y, query_ids=INDEX, gallery_ids=FIVE % 3),
            best_ranks(INDEX[:, None] == FIVE % 3),
        ),
    ),
    "ids and positives": (
        lambda: tw.retrieval_ranks(X, Y, INDEX, query_ids=INDEX, gallery_ids=FIVE),
        ShapeError,
        ("by positives, or by query_ids and gallery_ids", "positives is given", "Pass one of the two"),
        lambda: (tw.retrieval_ranks(X, Y, query_ids=INDEX, gallery_ids=FIVE), ranks()),
    ),
    "ids of other items": (
        lambda: tw.retrieval_ranks(X, Y, query_ids=INDEX, gallery_ids=INDEX),
        ShapeError,
        (r"gallery_ids must be \(5,\), one id per row", r"\(3,\)", r"filter drop some of its entries\?"),
    ),
    "ids in a column": (
        lambda: tw.retrieval_ranks(X, Y, query_ids=INDEX[:, None], gallery_ids=FIVE),
        ShapeError,
        (r"query_ids must be \(3,\)", r"\(3, 1\)", "Reshape it"),
        lambda: (tw.retrieval_ranks(X, Y, query_ids=INDEX[:, None].reshape(3), gallery_ids=FIVE), ranks()),
    ),
    "ids of floats": (
        lambda: tw.retrieval_ranks(X, Y, query_ids=IDS, gallery_ids=OTHERS),
        DtypeError,
        ("query_ids holds integers", "float32", r"Number the ids of both sides together: torch\.unique"),
        lambda: (tw.retrieval_ranks(X, Y, **numbered(IDS, OTHERS)), best_ranks(IDS[:, None] == OTHERS)),
    ),
    "ids in a list": (
        lambda: tw.retrieval_ranks(X, Y, query_ids=INDEX, gallery_ids=[0, 1, 2, 3, 4]),
        DtypeError,
        ("gallery_ids is a tensor of integers", "list", r"torch\.as_tensor\(\)"),
        lambda: (tw.retrieval_ranks(X, Y, query_ids=INDEX, gallery_ids=torch.as_tensor(FIVE.tolist())), ranks()),
    ),
    "ids of one side in a search": (
        lambda: tw.nearest(X, Y, 2, query_ids=INDEX),
        ShapeError,
        ("item with the id of a query is left out", "gallery_ids is None", "Pass both or neither"),
        lambda: (
            tw.nearest(X, Y, 2, query_ids=INDEX, gallery_ids=FIVE).indices,
            nearest(hidden=INDEX[:, None] == FIVE),
        ),
    ),
    "a range of ranks that is too small": (
        lambda: tw.mine_hard_negatives(X, Y, num_negatives=4, range_max=3),
        RangeError,
        ("range_max - range_min at least num_negatives", "got 4, 0 and 3", "Increase range_max, or leave it out"),
        lambda: (tw.mine_hard_negatives(X, Y, num_negatives=4).indices, nearest(4, hidden=INDEX[:, None] == FIVE)),
    ),
    "columns of other queries": (
        lambda: tw.mine_hard_negatives(X, Y).columns(["a"], list("abcde")),
        ShapeError,
        ("one entry for each of the 3 rows", "got 1", "whose features were given"),
        lambda: (
            torch.tensor([int(item) for item in tw.mine_hard_negatives(X, Y).columns("abc", "01234")["negative"]]),
            nearest(3, hidden=INDEX[:, None] == FIVE).flatten(),
        ),
    ),
    "metrics without a right answer": (
        lambda: tw.retrieval_metrics(TABLE, torch.zeros(4)),
        RangeError,
        ("needs? a query with a right answer", "none of the 4", "relevance of right answers above 0"),
        lambda: (metric(TABLE, torch.ones(4)), (1 / (TABLE[:3].double() + 1)).mean()),
    ),
    "complex relevance": (
        lambda: tw.retrieval_metrics(TABLE, torch.ones(4) * 1j),
        DtypeError,
        ("relevance holds real numbers", "complex64", r"Pass its \.real"),
        lambda: (metric(TABLE, (torch.ones(4) * 1j + 1).real), (1 / (TABLE[:3].double() + 1)).mean()),
    ),
    "relevance of other answers": (
        lambda: tw.retrieval_metrics(TABLE, torch.ones(3)),
        ShapeError,
        (r"relevance must be \(4, 1\)", r"got \(3,\)", "Pad it with 0 where positives are -1"),
        lambda: (metric(TABLE, F.pad(torch.ones(3), (0, 1))), (1 / (TABLE[:3].double() + 1)).mean()),
    ),
    "infinite relevance": (
        lambda: tw.retrieval_metrics(TABLE, torch.full((4,), torch.inf)),
        RangeError,
        ("relevance must be finite", "NaN or infinity", "Check how it was computed"),
        None,
    ),
    "names of other queries": (
        lambda: write_trec("nowhere", ["a"], list("vwxyz"), tw.nearest(X, Y, 1), INDEX),
        ShapeError,
        ("one row for each query", r"got 1, 3, \(3,\)", r"Did a filter drop some queries\?"),
        None,
    ),
    "a name with a space": (
        lambda: write_trec("nowhere", ["a", "b c", "d"], list("vwxyz"), tw.nearest(X, Y, 1), INDEX),
        RangeError,
        ("has no spaces and is not empty", "'b c'", "Replace spaces"),
        lambda: (first_items(["a", "b c".replace(" ", "_"), "d"]), nearest(1).flatten()),
    ),
    "k of 0": (lambda: tw.nearest(X, Y, 0), RangeError, ("k must be 1 or more", "got 0", "how many items to find")),
    "k of 2.0": (lambda: tw.nearest(X, Y, 2.0), DtypeError, ("k is a whole number", "2.0", "how many items to find")),
    "below of integers": (
        lambda: tw.nearest(X, Y, 2, below=INDEX),
        DtypeError,
        ("below holds scores", "int64", r"\.float\(\)"),
        lambda: (tw.nearest(X, Y, 2, below=INDEX.float()).indices, nearest(hidden=scores() >= INDEX[:, None])),
    ),
    "below in a list": (
        lambda: tw.nearest(X, Y, 2, below=[0.1, 0.2, 0.3]),
        DtypeError,
        (r"below is a number, or a tensor of shape \(3,\)", "list", r"torch\.as_tensor\(\)"),
        lambda: (
            tw.nearest(X, Y, 2, below=torch.as_tensor([0.1, 0.2, 0.3])).indices,
            nearest(hidden=scores() >= torch.tensor([[0.1], [0.2], [0.3]])),
        ),
    ),
    "below as text": (
        lambda: tw.nearest(X, Y, 2, below="0.2"),
        DtypeError,
        ("below is a number", "str", r"Convert it with float\(\)"),
        lambda: (tw.nearest(X, Y, 2, below=float("0.2")).indices, nearest(hidden=scores() >= 0.2)),
    ),
    "below in a column": (
        lambda: tw.nearest(X, Y, 2, below=X[:, :1]),
        ShapeError,
        (r"below is a number or \(3,\)", r"\(3, 1\)", "Reshape it"),
        lambda: (tw.nearest(X, Y, 2, below=X[:, :1].reshape(3)).indices, nearest(hidden=scores() >= X[:, :1])),
    ),
    "below for each pair": (
        lambda: tw.nearest(X, Y, 2, below=X),
        ShapeError,
        (r"below is a number or \(3,\)", r"\(3, 4\)", r"filter drop some of its entries\?"),
    ),
    "below of NaN": (
        lambda: tw.nearest(X, Y, 2, below=torch.full((3,), torch.nan)),
        RangeError,
        ("below holds NaN", "query 0", "Check how it was computed"),
    ),
    "progress as text": (
        lambda: tw.nearest(X, Y, 2, progress="bar"),
        DtypeError,
        ("progress is True, False, or a function", "str 'bar'", "Pass one of these"),
        lambda: (tw.nearest(X, Y, 2, progress=lambda *numbers: None).indices, nearest()),
    ),
    "ranks by a backend that cannot": (
        lambda: tw.retrieval_ranks(X.double(), Y.double(), options=tw.TileOptions(backend="triton")),
        BackendError,
        ("cannot rank torch.float64", "width 4 on cpu", 'Use backend="auto"'),
        lambda: (tw.retrieval_ranks(X.double(), Y.double(), options=tw.TileOptions(backend="auto")), ranks()),
    ),
    "a workspace too small for a tile": (
        lambda: tw.nearest(LARGE, SMALL, 1, options=tw.TileOptions(workspace_mib=1)),
        ConfigError,
        (
            "needs at least 13 MiB of scratch memory",
            "workspace_mib is 1",
            r"Increase TileOptions\(workspace_mib=\.\.\.\)",
        ),
        lambda: (
            tw.nearest(LARGE, SMALL, 1, options=tw.TileOptions(workspace_mib=13)).scores,
            LARGE.double() @ SMALL.double().T,
        ),
    ),
    "recall of scores": (
        lambda: tw.recall_at_k(torch.zeros(3)),
        DtypeError,
        ("ranks holds integers", "float32", "Pass the result of retrieval_ranks, not scores"),
        lambda: (recall(tw.retrieval_ranks(X, Y), 1), (ranks() < 1).double().mean()),
    ),
    "recall of a cube": (
        lambda: tw.recall_at_k(TABLE[:, None, None]),
        ShapeError,
        (r"ranks must be \(n,\) or \(n, p\)", r"\(4, 1, 1\)", r"\.flatten\(1\)"),
        lambda: (recall(TABLE[:, None, None].flatten(1), 5), torch.tensor(2 / 3)),
    ),
    "recall of a list": (
        lambda: tw.recall_at_k(TABLE.tolist()),
        DtypeError,
        ("ranks is a tensor of integers", "list", r"torch\.as_tensor\(\)"),
        lambda: (recall(torch.as_tensor(TABLE.tolist()), 5), torch.tensor(2 / 3)),
    ),
    "recall at a number": (
        lambda: tw.recall_at_k(TABLE, 5),
        DtypeError,
        ("ks is a sequence of whole numbers", "got 5", r"write ks=\(5,\)"),
        lambda: (torch.tensor(tw.recall_at_k(TABLE, ks=(5,))[5]), torch.tensor(2 / 3)),
    ),
    "recall at a tensor": (
        lambda: tw.recall_at_k(TABLE, torch.tensor([1, 5])),
        DtypeError,
        ("ks is a sequence of whole numbers", "tensor", r"Convert it with \.tolist\(\)"),
        lambda: (torch.tensor(tw.recall_at_k(TABLE, torch.tensor([1, 5]).tolist())[5]), torch.tensor(2 / 3)),
    ),
    "recall at 0": (
        lambda: tw.recall_at_k(TABLE, ks=(0,)),
        RangeError,
        ("whole numbers from 1 up", r"\(0,\)", "Recall at 1 is the first"),
        lambda: (recall(TABLE, 1), torch.tensor(1 / 3)),
    ),
    "recall at nothing": (
        lambda: tw.recall_at_k(TABLE, ks=()),
        RangeError,
        ("at least one", r"\(\)", "Recall at 1 is the first"),
        lambda: (recall(TABLE, 1), torch.tensor(1 / 3)),
    ),
    "recall of nobody": (
        lambda: tw.recall_at_k(TABLE * 0 - 1),
        RangeError,
        ("a query with a right answer", "all 4 have rank -1", r"ids of queries and gallery match\?"),
    ),
}


def recall(found: Tensor, k: int) -> Tensor:
    return torch.tensor(tw.recall_at_k(found, ks=(k,))[k])
