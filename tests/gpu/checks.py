"""What the GPU tests ask, as functions of the place: a CUDA device with the Triton backend, or, to see that the
questions themselves are right, the CPU with the torch backend (tests/test_gpu_checks.py).

Axes: n rows, m columns, d features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tests import oracles
from tests.compare import assert_close, relative_error
from tests.kernels.pair_cases import CASES, HARD
from tests.kernels.pair_checks import (
    all_needs,
    check_backward,
    check_forward,
    grads_asked,
    incoming_gradients,
    stats_asked,
)
from tests.kernels.pair_maker import Maker
from tests.losses.loss_cases import Problem, converted, problem, solve
from torch import Tensor

import tilewise as tw
from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.registry import load_backend
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec, Stats
from tilewise.ops import limits
from tilewise.ops import rows as drop_rows

LOSS_FLOOR = 1e-5  # a rounded number may hit the truth by luck; nobody must be luckier
TF32_FLOOR = 5e-4  # of the gradient of a number: G is rounded to 11 significant bits before its sum
NUMBERS = "scale", "temperature", "bias"
GRAD_FLOOR = {torch.float32: 0.0, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # of single numbers and of biases
CHUNK = 65_536


@dataclass(frozen=True)
class Place:
    """Where, and with which backend."""

    device: str = "cuda"
    backend: Any = "triton"

    def options(self, **settings: Any) -> tw.TileOptions:
        """Explicit: nothing falls back. Full float32 unless told."""
        return tw.TileOptions(backend=self.backend, **({"precision": "highest"} | settings))

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device is an error."""
        if self.device != "cuda":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def check_case(place: Place, name: str, dtype: torch.dtype, size: int, seed: int, **settings: Any) -> None:
    """A case of tests/kernels/pair_cases.py."""
    pair, spec = CASES[name](Maker(dtype, place.device, size, seed))
    backend, options = load_backend(place.backend), place.options(**settings)
    assert backend.why_not(pair.shape, spec, options) is None
    check_forward(backend, pair, spec, options, hard=name in HARD)
    check_backward(backend, pair, spec, options, hard=name in HARD, floor=GRAD_FLOOR[dtype])


def assert_accurate(got: Tensor, dense: Tensor, exact: Tensor, floor: float, what: str) -> None:
    """At most 1.5 times the dense path's own error in the same type, or the floor."""
    ours, theirs = relative_error(got, exact), relative_error(dense, exact)
    assert ours <= max(1.5 * theirs + 1e-6, floor), f"{what}: error {ours:.3g}, dense {theirs:.3g}"


def check_loss(
    place: Place, name: str, dtype: torch.dtype, *, n: int, d: int, seed: int, **settings: Any
) -> tuple[Problem, Tensor]:
    """Loss and gradients against float64 dense; then once more, and the host never waits."""
    made = problem(name, dtype, n=n, d=d, seed=seed, device=place.device)
    options = place.options(**settings)
    loss, grads = solve(made.ours, made.leaves, options=options)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    if dtype == torch.float32:
        assert_close(loss, want, 2e-6, "loss")
        for leaf in want_grads:
            assert_close(grads[leaf], want_grads[leaf], 1e-5, leaf)
    else:
        dense, dense_grads = solve(made.dense, made.leaves)
        assert_accurate(loss, dense, want, LOSS_FLOOR, "loss")
        for leaf, exact in want_grads.items():
            floor = GRAD_FLOOR[dtype] if exact.dim() < 2 else 0.0
            assert grads[leaf].dtype == made.leaves[leaf].dtype
            assert_accurate(grads[leaf], dense_grads[leaf], exact, floor, leaf)
    with place.no_waiting():
        again, again_grads = solve(made.ours, made.leaves, options=options)
    assert torch.equal(again, loss)
    assert all(torch.equal(again_grads[leaf], grads[leaf]) for leaf in grads)
    return made, loss


def check_same_twice(place: Place, name: str, dtype: torch.dtype, size: int, seed: int) -> None:
    """Bitwise, with other garbage in the memory that is handed out in between."""
    pair, spec = CASES[name](Maker(dtype, place.device, size, seed))
    backend, options = load_backend(place.backend), place.options()

    def once() -> list[Tensor]:
        stats = backend.forward(pair, spec, options)
        grads = backend.backward(pair, stats, incoming_gradients(stats), all_needs(pair), spec, options)
        return [*stats_asked(stats).values(), *grads_asked(grads).values()]

    first = once()
    for _ in range(3):
        garbage = [torch.randn(2**k, device=place.device) for k in range(8, 21)]
        del garbage
        assert all(torch.equal(one, other) for one, other in zip(first, once(), strict=True))


def away_from_the_grid(pair: Pair) -> Pair:
    """The same numbers at addresses that no vector load likes, features between NaN."""

    def moved(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        if values.dim() == 0:
            return torch.stack([values, values, values])[1]
        if values.dim() == 1:
            return torch.cat([values[:1], values])[1:]
        wide = values.new_full((values.shape[0] + 1, values.shape[1] + 3), torch.nan)
        wide[1:, 1:-2] = values
        return wide[1:, 1:-2]

    changed = {f.name: moved(getattr(pair, f.name)) for f in dataclasses.fields(pair) if f.name[-5:] != "start"}
    if pair.b is pair.a:
        changed["b"] = changed["a"]
    return dataclasses.replace(pair, **changed)


def check_layout(place: Place, name: str, dtype: torch.dtype, seed: int) -> None:
    """Sliced and unaligned inputs give what contiguous ones give."""
    pair, spec = CASES[name](Maker(dtype, place.device, 3, seed))
    backend, options = load_backend(place.backend), place.options()
    stats = backend.forward(pair, spec, options)
    other = backend.forward(away_from_the_grid(pair), spec, options)
    for key, value in stats_asked(stats).items():
        assert torch.equal(getattr(other, key), value), key
    grad = incoming_gradients(stats)
    grads = backend.backward(pair, stats, grad, all_needs(pair), spec, options)
    shifted = GradStats(**{k: None if v is None else torch.cat([v[:1], v])[1:] for k, v in vars(grad).items()})
    other_grads = backend.backward(away_from_the_grid(pair), stats, shifted, all_needs(pair), spec, options)
    for key, value in grads_asked(grads).items():
        assert_close(getattr(other_grads, key), value, max(1e-5, GRAD_FLOOR[dtype]), key)


def check_frozen(place: Place, dtype: torch.dtype, n: int, d: int) -> None:
    """Each side's gradient is the same whether or not the other side has one."""
    a, b, scale = aligned(place, n, d, dtype, 1.0)

    def gradients(*wanted: Tensor) -> tuple[Tensor, ...]:
        leaves = [leaf.detach().requires_grad_(any(leaf is one for one in wanted)) for leaf in (a, b, scale)]
        loss = tw.clip_loss(*leaves, options=place.options())
        return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])

    both = gradients(a, b, scale)
    for alone, want in zip((a, b, scale), both, strict=True):
        assert_close(gradients(alone)[0], want, max(1e-5, GRAD_FLOOR[dtype]))


def aligned(place: Place, n: int, d: int, dtype: torch.dtype, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs that belong together, of length 1, and a scale of 30."""
    generator = torch.Generator(place.device).manual_seed(n + d)
    a = F.normalize(torch.randn(n, d, device=place.device, generator=generator), dim=1)
    more = torch.randn(n, d, device=place.device, generator=generator) * (noise / d**0.5)
    return a.to(dtype), F.normalize(a + more, dim=1).to(dtype), torch.tensor(30.0, device=place.device)


def check_ignored(place: Place, dtype: torch.dtype, n: int, d: int, seed: int, patch: Any) -> None:
    """Ignored rows meet no column, loss and gradients stay, and the host waits once: in forward, for their number."""
    made = problem("cross_entropy_bias", dtype, n=n, d=d, seed=seed, device=place.device)
    options, backend = place.options(gradients="backward"), load_backend(place.backend)
    patch.setattr(drop_rows, "may_read", lambda pair, spec: False)
    want, want_grads = solve(made.ours, made.leaves, options=options)
    patch.undo()
    patch.setattr(drop_rows, "_all_stayed", {})
    rows = []
    for name in ("forward", "backward"):
        patch.setattr(backend, name, _counting_rows(getattr(backend, name), rows))
    with limits.changed(worth_waiting=0):
        loss, grads = solve(made.ours, made.leaves, options=options)
    kept = n - -(-n // 3)  # every third is ignored
    assert rows == [kept if place.device == "cpu" else -(-kept // 128) * 128] * 2
    assert_close(loss, want, 1e-6 if dtype != torch.float64 else 1e-14, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], max(1e-5, GRAD_FLOOR[dtype]), leaf)
    if place.device != "cuda":
        return
    asked, ask = [], HostScalar.__call__
    patch.setattr(HostScalar, "__call__", lambda self: asked.append(1) or ask(self))
    with limits.changed(worth_waiting=0), place.no_waiting():  # but for events, which that does not see
        value = made.ours(SimpleNamespace(**made.leaves), options=options)
        assert len(asked) == 1
        torch.autograd.grad(value, list(made.leaves.values()))
    assert len(asked) == 1


def _counting_rows(call: Any, rows: list[int]) -> Any:
    def counted(pair: Pair, *rest: Any, **more: Any) -> Any:
        rows.append(pair.a.shape[0])
        return call(pair, *rest, **more)

    return counted


def check_tokens(place: Place, dtype: torch.dtype, *, n: int, d: int, seed: int, picks: int = 0) -> None:
    """Log-probability, entropy and argmax of tokens and the gradients of both against dense; the host never waits.

    With ``picks``, also the log-probabilities of so many classes, some of them twice, at a temperature of each token.
    """
    made = problem("cross_entropy_bias", dtype, n=n, d=d, seed=seed, device=place.device)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(len(made.leaves["classifier"]), (n,), generator=generator).to(place.device)
    target[::3] = -100
    valid, upstream = target != -100, torch.randn(2 + picks, n, generator=generator).to(place.device)
    pick = torch.randint(len(made.leaves["classifier"]), (n, max(picks, 2)), generator=generator).to(place.device)
    pick[::2, 1] = pick[::2, 0]
    pick[1::2, 0] = target[1::2].clamp(min=0)
    each = torch.rand(n, generator=generator).to(place.device) + 0.5 if picks else torch.ones(n, device=place.device)
    more = {"pick": pick, "temperature": each} if picks else {}

    def ours(p: Any) -> Tensor:
        stats = tw.linear_token_stats(
            p.hidden,
            p.classifier,
            target,
            linear_bias=p.bias,
            logit_scale=p.scale,
            softcap=8.0,
            options=place.options(),
            **more,
        )
        found["argmax"], found["accuracy"] = stats.argmax, stats.accuracy
        return torch.stack([stats.log_prob, stats.entropy, *(stats.picked.unbind(1) if picks else ())])

    def dense(p: Any) -> Tensor:
        logits = p.scale.to(p.hidden.dtype) * p.hidden @ p.classifier.T + p.bias
        log_p = (8.0 * torch.tanh(logits / 8.0) / each[:, None].to(logits.dtype)).log_softmax(-1)
        own = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
        found["log_p"] = log_p.detach()
        picked = log_p.gather(1, pick).unbind(1) if picks else ()
        return torch.where(valid, torch.stack([own, -(log_p.exp() * log_p).sum(1), *picked]), 0.0)

    found: dict[str, Tensor] = {}
    value, grads = solve(ours, made.leaves, upstream)
    plain, plain_grads = solve(dense, made.leaves, upstream)
    want, want_grads = solve(dense, converted(made.leaves, torch.float64), upstream)
    assert value.dtype == torch.float32
    for row, name in enumerate(("log_prob", "entropy", *(f"picked {k}" for k in range(picks)))):
        assert_accurate(value[row], plain[row], want[row], LOSS_FLOOR, name)
    # The gradient of the scale is <hidden, its gradient> / scale, which may cancel: the error is relative to the terms.
    terms = made.leaves["hidden"].double().norm() * want_grads["hidden"].norm() / made.leaves["scale"].double().abs()
    for leaf, exact in want_grads.items():
        floor = GRAD_FLOOR[dtype] if exact.dim() < 2 else 0.0
        answers = [grads[leaf], plain_grads[leaf], exact]
        if leaf == "scale":
            answers = [torch.stack([answer.double(), terms.detach()]) for answer in answers]
        assert_accurate(*answers, max(floor, 1e-5), leaf)
    best = found["log_p"].max(1).values
    reached = found["log_p"].gather(1, found["argmax"].clamp(min=0)[:, None])[:, 0]
    assert (best - reached)[valid].max() <= 1e-5
    assert (found["argmax"][~valid] == -1).all()
    assert found["accuracy"] == (found["argmax"] == target)[valid].float().mean()
    with place.no_waiting():
        again, again_grads = solve(ours, made.leaves, upstream)
    assert torch.equal(again, value)
    assert all(torch.equal(again_grads[leaf], grads[leaf]) for leaf in grads)


def check_good_student(place: Place, beta: float, n: int = 48, m: int = 300, d: int = 16) -> None:
    """Distillation in float32 of a student that is sure of the same classes as its teacher, with scores of up to 80.

    Its gradient is a small difference of large terms, so errors of log-sum-exps would show.
    """
    generator = torch.Generator().manual_seed(0)
    classes, own = torch.randn(m, d, generator=generator), torch.randint(0, m, (n,), generator=generator)
    student, teacher = (2.5 * classes[own] + 0.3 * torch.randn(n, d, generator=generator) for _ in range(2))
    leaves = {"hidden": student.to(place.device).requires_grad_(), "head": classes.to(place.device).requires_grad_()}
    teacher, head = teacher.to(place.device), classes.to(place.device)

    def ours(p: Any) -> Tensor:
        return tw.linear_distillation_loss(p.hidden, p.head, teacher, head, beta=beta, options=place.options())

    def dense(p: Any) -> Tensor:
        logits, other = p.hidden @ p.head.T, teacher.double() @ head.double().T
        return oracles.distillation_dense(logits, other, beta).mean()

    value, grads = solve(ours, leaves)
    want, want_grads = solve(dense, converted(leaves, torch.float64))
    assert relative_error(value, want) <= 1e-5
    for name, grad in grads.items():
        assert relative_error(grad, want_grads[name]) <= 6e-6, name


def check_never_negative(place: Place, dtype: torch.dtype, lowest: float, n: int, d: int, **settings: Any) -> None:
    """The loss of a row is a positive number; of pairs that fit well, at scale 100, almost 0."""
    for noise in (0.0, 0.1, 0.5):
        a, b, _ = aligned(place, n, d, dtype, noise)
        for name, loss in {
            "clip": tw.clip_loss(a, b, 100.0, reduction="none", options=place.options(**settings)),
            "info_nce": tw.info_nce(a, b, temperature=0.01, reduction="none", options=place.options(**settings)),
        }.items():
            assert loss.isfinite().all()
            assert loss.min().item() >= lowest, f"{name} {noise}: {loss.min().item():.2e}"
            assert loss.max().item() < 10.0


def check_tf32(place: Place, n: int, d: int, seed: int) -> None:
    """Precision "high" is coarser than "highest" (so the switch arrives), and not by more than TF32 is."""
    made = problem("clip", torch.float32, n=n, d=d, seed=seed, device=place.device)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    errors = {}
    for precision in ("highest", "high"):
        loss, grads = solve(made.ours, made.leaves, options=place.options(precision=precision))
        assert_close(loss, want, 2e-6 if precision == "highest" else 1e-3)
        errors[precision] = relative_error(grads["image"], want_grads["image"])
    assert errors["highest"] <= 1e-5
    assert errors["high"] <= 5e-3
    if place.device == "cuda":
        assert errors["high"] > 5 * errors["highest"]


def errors_in_tf32(
    place: Place, name: str, n: int, d: int, first_seed: int, seeds: int = 8, **settings: Any
) -> dict[str, tuple[float, float]]:
    """The error of a loss and of its gradients in TF32, ours and that of the dense path, the means over seeds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(first_seed, first_seed + seeds):
        made = problem(name, torch.float32, n=n, d=d, seed=seed, device=place.device)
        want = flat(solve(made.dense, converted(made.leaves, torch.float64)))
        ours = flat(solve(made.ours, made.leaves, options=place.options(precision="high", **settings)))
        with matmul_precision("high"):
            dense = flat(solve(made.dense, made.leaves))
        for key, exact in want.items():
            pair = relative_error(ours[key], exact), relative_error(dense[key], exact)
            found.setdefault(key, []).append(pair)
    return {key: (mean(one for one, _ in each), mean(other for _, other in each)) for key, each in found.items()}


def flat(solved: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Tensor]:
    """A loss and its gradients by name."""
    return {"loss": solved[0], **solved[1]}


def check_tf32_errors(place: Place, name: str, n: int, d: int, seed: int, **settings: Any) -> None:
    """At most 1.5 times the dense path's error in TF32; a number's gradient may be off as its rounded terms are."""
    for key, (ours, dense) in errors_in_tf32(place, name, n, d, seed, **settings).items():
        floor = TF32_FLOOR if key in NUMBERS else 0.0
        assert ours <= max(1.5 * dense + 1e-6, floor), f"{key}: error {ours:.2g}, dense {dense:.2g}"


def search_errors_in_tf32(
    place: Place, n: int, m: int, d: int, first_seed: int, seeds: int = 8
) -> dict[str, tuple[float, float]]:
    """As `errors_in_tf32`, of the scores of the nearest items, and the shares of wrong items and of wrong ranks."""
    found: dict[str, list[tuple[float, float]]] = {}
    options = place.options(precision="high")
    for seed in range(first_seed, first_seed + seeds):
        generator = torch.Generator(place.device).manual_seed(seed)
        queries = F.normalize(torch.randn(n, d, device=place.device, generator=generator), dim=1)
        gallery = F.normalize(torch.randn(m, d, device=place.device, generator=generator), dim=1)
        gallery[:n] = F.normalize(gallery[:n] + 0.3 * queries, dim=1)  # some are better than the answer
        found_scores, items = tw.nearest(queries, gallery, k=10, options=options)
        ours = found_scores, items, tw.retrieval_ranks(queries, gallery, options=options)
        exact = queries.double() @ gallery.double().T
        with matmul_precision("high"):
            dense = found_in(queries @ gallery.T)
        want = found_in(exact)
        for key, at in (("scores", 0), ("items", 1), ("ranks", 2)):
            if key == "scores":  # against the true scores of the items that were found
                pair = tuple(relative_error(one[0], exact.gather(1, one[1])) for one in (ours, dense))
            else:
                pair = tuple((one[at] != want[at]).double().mean().item() for one in (ours, dense))
            found.setdefault(key, []).append(pair)
    return {key: (mean(one for one, _ in each), mean(other for _, other in each)) for key, each in found.items()}


def found_in(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and places of the ten nearest items, and the rank of item i for query i."""
    top = scores.topk(10)
    return top.values, top.indices, (scores > scores.diagonal()[:, None]).sum(1)


def check_search_in_tf32(place: Place, n: int, m: int, d: int, seed: int) -> None:
    """At most 1.5 times what a stored matrix of scores in TF32 has."""
    for key, (ours, dense) in search_errors_in_tf32(place, n, m, d, seed).items():
        slack = 1e-6 if key == "scores" else 3.0 / n  # a few items and ranks change places by chance
        assert ours <= 1.5 * dense + slack, f"{key}: error {ours:.2g}, dense {dense:.2g}"


def check_large(
    place: Place, n: int, m: int, d: int, dtype: torch.dtype, *, samples: int, columns: bool = True
) -> None:
    """Statistics and gradients of a few rows and columns, the last ones among them, against chunks in float64.

    Row i answers to a column at the far end, so that an offset that wraps around is seen.
    """
    generator = torch.Generator(place.device).manual_seed(n)
    a = torch.randn(n, d, device=place.device, dtype=dtype, generator=generator).div_(d**0.5)
    b = torch.randn(m, d, device=place.device, dtype=dtype, generator=generator).div_(d**0.5)
    scale = torch.tensor(8.0, device=place.device)
    key = (m - 1 - torch.arange(n, device=place.device)) % m
    pair, spec = Pair(a=a, b=b, scale=scale, row_key=key), PairSpec(row_lse=True, col_lse=columns, positive="one")
    backend, options = load_backend(place.backend), place.options()
    stats = backend.forward(pair, spec, options)
    grad = GradStats(
        row_lse=torch.rand(n, device=place.device, generator=generator) / n,
        row_pos=-torch.rand(n, device=place.device, generator=generator) / n,
        col_lse=torch.rand(m, device=place.device, generator=generator) / n if columns else None,
    )
    grads = backend.backward(pair, stats, grad, Needs(a=True, b=True), spec, options)
    assert stats.row_lse is not None
    assert stats.row_pos is not None
    for side, other, got in ((a, b, grads.a), (b, a, grads.b)):
        rows, mine = side is a, len(side)
        pick = torch.cat([torch.arange(0, mine, max(1, mine // samples)), torch.arange(max(0, mine - samples), mine)])
        pick = pick.unique().to(place.device)
        x_of = side[pick].double() * scale.double()
        lse, product = None, torch.zeros(len(pick), d, dtype=torch.float64, device=place.device)
        for start in range(0, len(other), CHUNK):
            part = slice(start, min(start + CHUNK, len(other)))
            near = other[part].double()
            x = x_of @ near.T
            here = torch.logsumexp(x, 1)
            lse = here if lse is None else torch.logaddexp(lse, here)
            i, j = (pick, part) if rows else (part, pick)
            g = entries(x if rows else x.T, stats, grad, key, i, j)
            product += scale.double() * ((g if rows else g.T) @ near)
        if rows:
            assert_close(stats.row_lse[pick], lse, 1e-5, "row_lse")
            own = (x_of * b[key[pick]].double()).sum(1)
            assert_close(stats.row_pos[pick], own, 1e-5, "row_pos")
        elif columns:
            assert stats.col_lse is not None
            assert_close(stats.col_lse[pick], lse, 1e-5, "col_lse")
        assert got is not None
        assert_close(got[pick], product, 2e-2 if dtype != torch.float32 else 1e-5, "gradient")


def entries(x: Tensor, stats: Stats, grad: GradStats, key: Tensor, i: Any, j: Any) -> Tensor:
    """G of the rows i and columns j, whose scores are x, in float64."""
    assert stats.row_lse is not None
    assert grad.row_lse is not None
    assert grad.row_pos is not None
    g = grad.row_lse[i].double()[:, None] * torch.exp(x - stats.row_lse[i].double()[:, None])
    if grad.col_lse is not None:
        assert stats.col_lse is not None
        g += grad.col_lse[j].double()[None, :] * torch.exp(x - stats.col_lse[j].double()[None, :])
    cols = torch.arange(j.start, j.stop, device=x.device) if isinstance(j, slice) else j
    return g + torch.where(key[i][:, None] == cols[None, :], grad.row_pos[i].double()[:, None], 0.0)


def peak_bytes(step: Any, times: int = 1) -> int:
    """The most memory that a step takes on the device above what was there, after a first one that fills caches."""
    step()
    gc.collect()  # or what other tests left is freed in the middle of the next, and hides as much of what it takes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_compiled(place: Place, name: str, dtype: torch.dtype, n: int, d: int, seed: int) -> None:
    """One graph, the same numbers."""
    torch._dynamo.reset()
    made = problem(name, dtype, n=n, d=d, seed=seed, device=place.device)
    options = place.options()

    def compiled(arguments: Any) -> Tensor:
        return torch.compile(lambda: made.ours(arguments, options=options), fullgraph=True)()

    loss, grads = solve(compiled, made.leaves)
    want, want_grads = solve(made.ours, made.leaves, options=options)
    assert_close(loss, want, 1e-5, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], max(1e-5, GRAD_FLOOR[dtype]), leaf)


def check_autocast(place: Place, n: int, d: int) -> None:
    """float32 features under autocast are bfloat16 features; the loss stays float32, gradients come back float32."""
    a, b, scale = (x.requires_grad_() for x in aligned(place, n, d, torch.float32, 1.0))
    with torch.autocast(place.device, dtype=torch.bfloat16):
        loss = tw.clip_loss(a, b, scale, options=place.options())
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, (a, b, scale))
    low = [x.detach().bfloat16().requires_grad_() for x in (a, b)] + [scale]
    want_loss = tw.clip_loss(*low, options=place.options())
    assert torch.equal(loss, want_loss)
    for one, other in zip(got, torch.autograd.grad(want_loss, low), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


def check_captured(name: str, dtype: torch.dtype, n: int, d: int, seed: int) -> None:
    """A CUDA graph of loss and gradients, replayed on other numbers, gives what eager mode gives for them."""
    made = problem(name, dtype, n=n, d=d, seed=seed, device="cuda")
    other = problem(name, dtype, n=n, d=d, seed=seed + 1, device="cuda")
    options = tw.TileOptions(backend="triton", precision="highest")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            solve(made.ours, made.leaves, options=options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grads = solve(made.ours, made.leaves, options=options)
    with torch.no_grad():
        for leaf, value in made.leaves.items():
            value.copy_(other.leaves[leaf])
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    want, want_grads = solve(made.ours, made.leaves, options=options)
    assert_close(loss, want, 1e-6, "loss")
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], max(1e-6, GRAD_FLOOR[dtype]), leaf)
