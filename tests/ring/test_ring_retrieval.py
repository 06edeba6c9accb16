"""Ranks over a ring equal those of one process, including ties: features are small integers with many ties."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.ring.crew import Crew, Failed, crew  # noqa: F401
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import wrapped

from tilewise.errors import DtypeError, GroupError, RangeError
from tilewise.retrieval import BothRanks, Nearest, nearest, retrieval_ranks, retrieval_ranks_both

KINDS = ("item i", "one", "several", "ids", "ids, excluded")
SPLITS = [([9], [9]), ([5, 8], [5, 8]), ([4, 0, 7], [4, 0, 7]), ([3, 6, 0, 5], [3, 6, 2, 5])]
Call = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def whole(kind: str, rows: Sequence[int], cols: Sequence[int], dtype: torch.dtype) -> Call:
    """Queries, gallery and the other arguments, with indices into the whole gallery."""
    random = torch.Generator().manual_seed(sum(rows))
    n, m = sum(rows), sum(cols)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    queries, gallery = integers(-1, 2, n, 3).to(dtype), integers(-1, 2, m, 3).to(dtype)
    more: dict[str, torch.Tensor] = {}
    if kind == "item i":
        starts = [(sum(rows[:k]), sum(cols[:k])) for k in range(len(rows))]
        more["positives"] = torch.cat([torch.arange(size) + col for size, (_, col) in zip(rows, starts, strict=True)])
    elif kind == "one":
        more["positives"] = integers(-1, m, n)
    elif kind == "several":
        more["positives"] = integers(-1, m, n, 3)
        clear = (more["positives"][:, :, None] != (drop := integers(-1, m, n, 2))[:, None, :]).all(1)
        more["exclude"] = torch.where(clear, drop, -1)
    else:
        more["query_ids"], more["gallery_ids"] = integers(0, 5, n), integers(0, 6, m)
        if "excluded" in kind:
            more["exclude"] = integers(-1, m, n)
    return queries, gallery, more


def shard(call: Call, kind: str, rank: int, rows: Sequence[int], cols: Sequence[int]) -> Call:
    mine, here = (slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in (rows, cols))
    queries, gallery, more = call
    cut = {name: value[here if name == "gallery_ids" else mine] for name, value in more.items()}
    if kind == "item i":
        del cut["positives"]
    return queries[mine], gallery[here], cut


def run_ranks(
    group: Any, kind: str, rows: list[int], cols: list[int], dtype: torch.dtype, device: str = "cpu"
) -> BothRanks:
    queries, gallery, more = shard(whole(kind, rows, cols, dtype), kind, group.rank(), rows, cols)
    queries, gallery, more = queries.to(device), gallery.to(device), {k: v.to(device) for k, v in more.items()}
    found = retrieval_ranks_both(queries, gallery, **more, group=group)
    alone = retrieval_ranks(queries, gallery, **more, group=group)
    assert torch.equal(found.query_to_gallery, alone)
    return found


def check(parts: Sequence[BothRanks], kind: str, rows: list[int], cols: list[int], dtype: torch.dtype) -> None:
    queries, gallery, more = whole(kind, rows, cols, dtype)
    want = retrieval_ranks_both(queries, gallery, **more)
    assert torch.equal(torch.cat([part.query_to_gallery for part in parts]), want.query_to_gallery)
    assert torch.equal(torch.cat([part.gallery_to_query for part in parts]), want.gallery_to_query)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, cols", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_over_virtual_ranks_equal_one_process(kind, rows, cols, dtype):
    parts = run_virtual(len(rows), lambda group: run_ranks(group, kind, rows, cols, dtype), timeout_s=300)
    check(parts, kind, rows, cols, dtype)


@pytest.mark.group
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_over_processes_equal_one_process(crew: Crew, kind):  # noqa: F811
    rows, cols = SPLITS[-1]
    check(crew.run(run_ranks, kind, rows, cols, torch.float32), kind, rows, cols, torch.float32)


SEARCHES = [([9], [9]), ([5, 8], [7, 2]), ([4, 0, 7], [4, 9, 0]), ([3, 6, 0, 5], [3, 6, 2, 5])]


def search_over_ranks(
    rows: Sequence[int], cols: Sequence[int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Callable[[Any], Nearest], tuple[tuple[Any, ...], dict[str, torch.Tensor]]]:
    """The search of a rank, and the arguments of the same search in one process; with many ties."""
    generator = torch.Generator().manual_seed(2)
    n, m = sum(rows), sum(cols)
    queries, gallery = (torch.randint(-1, 2, (size, 3), generator=generator).to(dtype) for size in (n, m))
    ids = [torch.randint(0, 5, (size,), generator=generator) for size in (n, m)]
    exclude, below = torch.randint(-1, m, (n,), generator=generator), torch.full((n,), 2.5)

    def work(group: Any) -> Nearest:
        mine, here = (slice(sum(s[: group.rank()]), sum(s[: group.rank() + 1])) for s in (rows, cols))
        more = {"query_ids": ids[0][mine], "gallery_ids": ids[1][here], "exclude": exclude[mine], "below": below[mine]}
        more = {name: value.to(device) for name, value in more.items()}
        return nearest(queries[mine].to(device), gallery[here].to(device), 4, **more, group=group)

    more = {"query_ids": ids[0], "gallery_ids": ids[1], "exclude": exclude, "below": below}
    return work, ((queries, gallery, 4), more)


def test_the_gallery_travels_once_when_answers_are_at_home():
    rows, width = 6, 3

    def sent(group: Any, kind: str) -> int:
        queries, gallery, more = shard(
            whole(kind, [rows] * 3, [rows] * 3, torch.float32), kind, group.rank(), [rows] * 3, [rows] * 3
        )
        with wrapped(group) as (name, counted):
            retrieval_ranks(queries, gallery, **more, group=name)
        return counted.sent

    once = 2 * rows * width * 4
    assert run_virtual(3, lambda group: sent(group, "item i")) == [once] * 3
    assert run_virtual(3, lambda group: sent(group, "one")) == [2 * once] * 3


def bad_rank(group: Any, how: str) -> None:
    queries = gallery = torch.eye(4)
    odd = group.rank() == 1
    if how == "nan" and odd:
        gallery = gallery * torch.nan
    index = torch.full((4,), 99 if how == "index" and odd else 0)
    retrieval_ranks(queries, gallery, index, group=group)


@pytest.mark.group
@pytest.mark.parametrize("how, text", [("nan", "finite"), ("index", "from 0 to 11")])
def test_an_error_on_one_rank_is_raised_on_all_ranks(crew: Crew, how, text):  # noqa: F811
    found = crew.outcomes(bad_rank, how, world=3)
    assert all(isinstance(result, Failed) for result in found)
    assert [result.kind for result in found] == ["GroupError", "RangeError", "GroupError"]
    assert all(text in result.message for result in found)
    assert all("RangeError" in found[rank].message and "on rank 1" in found[rank].message for rank in (0, 2))
    crew.run(run_ranks, "one", *SPLITS[2], torch.float32, world=3)  # the group still works


@pytest.mark.parametrize(
    "collect",
    [list, tuple, np.array, lambda names: np.array(names, dtype=object), lambda names: np.array(names, dtype="S1")],
    ids=["list", "tuple", "array", "array of objects", "array of bytes"],
)
def test_string_ids_are_refused_with_advice_that_works(collect):
    query_names, gallery_names = collect(["b", "a"]), collect(["a", "b", "c"])
    queries, gallery = torch.eye(2, 3), torch.eye(3)
    with pytest.raises(DtypeError, match="Number the strings") as error:
        retrieval_ranks(queries, gallery, query_ids=query_names, gallery_ids=gallery_names)
    table, make, both = re.fullmatch(
        r".*strings: number = (.*), then (.*)\. If .*: (.*)", str(error.value), re.DOTALL
    ).groups()
    names = eval(both, {"query_names": query_names, "gallery_names": gallery_names})
    number = eval(table, {"names": names})
    ids = [eval(make, {"torch": torch, "number": number, "names": names}) for names in (query_names, gallery_names)]
    assert retrieval_ranks(queries, gallery, query_ids=ids[0], gallery_ids=ids[1]).tolist() == [1, 1]


def test_objects_and_lists_of_tensors_are_refused_with_advice_that_works():
    queries, gallery = torch.eye(2, 3), torch.eye(3)
    values = np.array([1, 0], dtype=object)
    with pytest.raises(DtypeError, match=r"such as (torch.as_tensor\(values.astype\('int64'\)\))"):
        retrieval_ranks(queries, gallery, query_ids=values, gallery_ids=torch.arange(3))
    ids = torch.as_tensor(values.astype("int64"))
    assert retrieval_ranks(queries, gallery, query_ids=ids, gallery_ids=torch.arange(3)).tolist() == [1, 1]
    with pytest.raises(DtypeError, match=r"Use torch.stack\(\)"):
        retrieval_ranks(list(queries), gallery)


@pytest.mark.parametrize("query, item", [(torch.nan, 1.0), (1.0, torch.nan), (1.0, torch.inf), (1e20, 1e20)])
def test_what_has_no_rank_is_refused_where_the_gallery_is_on_another_rank(query, item):
    def ranks(group: Any) -> torch.Tensor:
        rows, cols = (4, 0) if group.rank() == 0 else (0, 6)
        index = torch.arange(rows)
        return retrieval_ranks(torch.full((rows, 3), query), torch.full((cols, 3), item), index, group=group)

    with pytest.raises((RangeError, GroupError), match="must be finite, and no score may overflow"):
        run_virtual(2, ranks)


def test_virtual_ranks_with_another_width_are_refused():
    with pytest.raises(GroupError, match="width: 3 on rank 0 but 4 on rank 1"):
        run_virtual(2, lambda group: retrieval_ranks(*(torch.ones(2, 3 + group.rank()),) * 2, group=group))
    with pytest.raises((RangeError, GroupError), match="gallery indices"):
        run_virtual(
            2, lambda group: retrieval_ranks(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([4, 0]), group=group)
        )
