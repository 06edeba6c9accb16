"""Forward of the filter: column order, a sample of the rows, the mass of each row in each tile, and what to drop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.backend import FilterGroup
from tilewise.kernels.filter_plan import rows_per_step, tile_count
from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import FilterPlan, Pair, PairShape, PairSpec, Stats
from tilewise.kernels.triton_impl.filtered import forward_kernels as kernels
from tilewise.kernels.triton_impl.filtered.rounding_kernels import exceeds_kernel, norm_kernel
from tilewise.kernels.triton_impl.launch import launch
from tilewise.kernels.triton_impl.scores import cdiv, exact_products, pieces, switches_of, tensors_of
from tilewise.kernels.triton_impl.sizes import mass_sizes, multiprocessors
from tilewise.kernels.triton_impl.tf32 import rounded, tensor_descriptor
from tilewise.kernels.triton_impl.two_pass import strategy as two_pass
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

GATHER_ROWS, GATHER_FEATURES = 32, 256
CHOOSE_ROWS, CHOOSE_TILES = 32, 64
PROBE_ROWS, PROBE_TILES = 32, 1024
NORM_ROWS, NORM_FEATURES, NORM_BLOCK = 8, 256, 4096
WORTH_PROBING = 2**38  # multiply-adds of one product; below, launching both ways costs more than is saved


def units(features: Tensor) -> int:
    """The row stride in units of 16 bytes; rows of `readable` features start at such addresses."""
    return features.stride(0) * features.element_size() // 16


def sample_rows(shape: PairShape, options: TileOptions) -> int:
    """The number of rows to probe; 0 for a small call."""
    if shape.products < WORTH_PROBING:
        return 0
    return plans.sample_size(shape.rows, shape.cols, sample_dtype(shape.dtype).itemsize, options)


def sample_dtype(features: torch.dtype) -> torch.dtype:
    """The type of the sample's scores: float16 lacks the range of products."""
    return torch.float32 if features == torch.float16 else features


def chunk_of_tiles(tiles: int, row_tiles: int, programs: int, most: int) -> int:
    """How many column tiles to gather at once: the number up to ``most`` that leaves the fewest programs idle.

    >>> chunk_of_tiles(1000, 64, 132, 80)
    66
    """

    def rounds(chunk: int) -> int:
        return tiles // chunk * cdiv(row_tiles * chunk, programs) + cdiv(row_tiles * (tiles % chunk), programs)

    most = min(most, tiles)
    return min(range(max(1, most // 2), most + 1), key=lambda chunk: (rounds(chunk), -chunk))


class FilterCall:
    """Base class of forward and backward of the filter."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions) -> None:
        self.pair, self.spec, self.options = pair, spec, options
        tensors, self.exact = tensors_of(pair, spec), exact_products(options)
        tensors |= {name: rounded(tensors[name], self.exact) for name in ("a", "b") if name in tensors}
        self.device, self.item = pair.a.device, pair.a.element_size()
        self.a, self.b = tensors["a"], tensors["b"]
        self.n, self.m, self.d = pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]
        self.width, self.tiles = plans.tile_width(self.m), tile_count(self.m)
        # Arguments of kernels by name
        self.known: dict[str, Any] = tensors | switches_of(tensors, spec, options)
        self.known |= {"softcap": spec.softcap, "picks": 0 if pair.pick is None else pair.pick.shape[1]}
        self.known |= {"a_stride": self.a.stride(0), "a_units": units(self.a), "b_units": units(self.b)}
        self.known |= {"n": self.n, "m": self.m, "col_start": pair.col_start, "tiles": self.tiles, "W": self.width}
        self.tolerance = plans.tolerance_of(options, pair.a.dtype)
        self.known |= {"UNIT": 16 // self.item, "tolerance": self.tolerance}

    def launch(self, kernel: Any, programs: int, *, warps: int = 4, stages: int = 2, **values: Any) -> None:
        """Launch a kernel with these arguments and those that all kernels share."""
        launch(kernel, programs, self.device, self.known, warps=warps, stages=stages, **values)


class FilterForward(FilterCall):
    """One pass over the columns in their new order, for as many rows at a time as their masses fit the workspace."""

    def __init__(
        self, pair: Pair, spec: PairSpec, options: TileOptions, save: bool = False, group: FilterGroup | None = None
    ) -> None:
        super().__init__(pair, spec, options)
        self.save, self.group = save, group
        self.sizes = mass_sizes(self.device, pair.a.dtype, self.width, self.exact)
        # A kept entry costs the same for a tile of any width.
        self.share = self.width / plans.WIDEST_TILE if self.device.type == "cuda" else 1.0
        self.saved: SavedColumns | None = None
        self.rounding = options.filter_tolerance == "rounding"
        # Over a group each rank may drop an equal part of the tolerance.
        ranks, cols = (1, self.m) if group is None else (group.ranks, group.cols)
        self.known |= {"usable": self.tolerance * plans.MARGIN / ranks, "most_entropy": math.log2(cols)}
        self.known |= {"HALVINGS": plans.HALVINGS, "ROUNDING": self.rounding}

    def _rounding_exceeds(self) -> Tensor:
        """1 if the rounding of scores may exceed its share of the tolerance; 2 if ``pair.only_if`` is not 1."""
        pair, features = self.pair, min(NORM_FEATURES, triton.next_power_of_2(self.d))
        row_programs = cdiv(self.n, NORM_ROWS)
        programs = row_programs + cdiv(self.m, NORM_ROWS)
        squares, case = pair.scale.new_empty(programs), pair.scale.new_empty(1, dtype=torch.int32)
        self.launch(norm_kernel, programs, squares=squares, R=NORM_ROWS, K=features)
        limit = plans.ROUNDING_SHARE * self.tolerance / torch.finfo(pair.stat_dtype).eps
        values: dict[str, Any] = {
            "row_programs": row_programs,
            "all_programs": programs,
            "limit": limit,
            "BLOCK": NORM_BLOCK,
        }
        self.launch(exceeds_kernel, 1, warps=8, squares=squares, case=case, **values)
        return case

    def run(self) -> tuple[Stats, FilterPlan, SavedColumns | None]:
        """Statistics and plan. The host does not wait; only the device knows which case is computed.

        The kernels of the exact loss are launched first: their program is known, so the device has work soon.
        """
        pair, group = self.pair, self.group
        asked = sample_rows(pair.shape, self.options) if group is None else group.sample
        # (1,) int32. 0: the filter. 1: the exact case, because the probe found it faster, or because the scores are rounded
        # too coarsely for the filter. Above: neither, because the results are not used.
        self.keep_all = self._rounding_exceeds()
        if asked:
            self.order, self.place, too_many = self._probe(asked)
            self.keep_all |= too_many
        else:
            self.order = plans.order_columns(pair)  # (m,) int32, the column at each place
            self.place = places(self.order)  # (m,) int32, the place of each column
        self.known["skip_if"] = self.keep_all
        stats = self._exact()
        self.bias = None if pair.bias is None else pair.bias[self.order.long()]
        mass = pair.a.new_empty((self.tiles, self.n))
        self.mean = pair.a.new_empty((self.tiles, self.d))
        spec = self.spec
        surprise = pair.scale.new_empty(self.n if spec.row_entropy else 0)
        # Over a group all rows at once, because the merge is a collective; see `filter_plan.fits_at_once`.
        step = self.n if group is not None else rows_per_step(self.n, self.tiles, self.options, plans.masses(spec))
        size = self.tiles * min(step, self.n)
        parts: dict[str, Tensor] = {"part": pair.scale.new_empty(size)}
        where: dict[str, Any] = {"place": self.place, "mass": mass, "all_rows": self.n}
        where["pick_place"] = self._picked(pair.pick, self.place)
        if spec.row_entropy:
            parts["entropy_part"] = torch.empty_like(parts["part"])
            where["surprise"] = surprise
        top: dict[str, Any] = {"row_top": stats.row_top, "row_top_col": stats.row_top_col}
        if spec.row_top:
            parts |= {"top_part": torch.empty_like(parts["part"]), "top_col_part": self.order.new_empty(size)}
            top |= {name: parts[name] for name in ("top_part", "top_col_part")}
        how = {"R": CHOOSE_ROWS, "T": CHOOSE_TILES}
        chosen: dict[str, Any] = {name: parts[name] for name in ("part", "entropy_part") if name in parts}
        for i in pieces(self.n, step):
            self._masses(parts, i)
            here = {"n": i.stop - i.start, "first_row": i.start}
            rows: dict[str, Any] = {"row_lse": stats.row_lse, "row_entropy": stats.row_entropy}
            self.launch(kernels.row_kernel, cdiv(here["n"], CHOOSE_ROWS), **rows, **chosen, **here, **how)
            if spec.row_top:
                self.launch(kernels.top_kernel, cdiv(here["n"], CHOOSE_ROWS), **top, **here, **how)
            if group is not None:
                stats = group.merged(stats)
            rows = {"row_lse": stats.row_lse, "row_entropy": stats.row_entropy, "row_pos": stats.row_pos}
            self.launch(kernels.choose_kernel, cdiv(here["n"], CHOOSE_ROWS), **where, **rows, **chosen, **here, **how)
        kept = (mass < 0).sum(1, dtype=torch.int32)
        keep_all = plans.too_many(kept, mass.numel(), self.share) | self.keep_all
        plan = FilterPlan(order=self.order, mass=mass, mean=self.mean, surprise=surprise, kept=kept, keep_all=keep_all)
        return stats, plan, self.saved

    def _exact(self) -> Stats:
        """The statistics of the exact case, computed if the device finds that ``keep_all`` is 1."""
        # A copy of the features, if one was needed, serves both cases.
        pair = dataclasses.replace(self.pair, a=self.a, b=self.b, only_if=self.keep_all)
        stats, self.saved = two_pass.forward(pair, self.spec, self.options, save=self.save, beside_plan=True)
        if self.saved is not None and not (self.keep_all.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.saved.probed_exact = HostScalar(self.keep_all)
        return stats

    def _picked(self, pick: Tensor | None, place: Tensor) -> Tensor | None:
        """The places of picked columns, from those of all: int32, -1 for a pick that is no column; None without picks."""
        if pick is None:
            return None
        own = pick - self.pair.col_start
        return torch.where((own >= 0) & (own < self.m), place[own.clamp(0, self.m - 1)], -1).contiguous()

    def _probe(self, asked: int) -> tuple[Tensor, Tensor, Tensor]:
        """The order of the columns, their places, and whether a sample of ``asked`` rows keeps too many entries."""
        pair = self.pair
        assert pair.row_key is not None
        those = plans.sample_of(self.n, asked)
        sample, key = self.a[those].clone(), pair.row_key[those].contiguous()
        sample[0] = plans.mean_row(pair)  # orders the columns; not counted in the result
        scores = pair.a.new_empty((self.m, asked), dtype=sample_dtype(pair.a.dtype))
        with matmul_precision("high"):
            multiply(scores, self.b, sample.T)
        order = plans.order_by(scores[:, 0], pair)
        place = places(order)
        mass, block = pair.a.new_empty((self.tiles, asked)), min(PROBE_ROWS, asked)
        parts: dict[str, Any] = {"part": pair.scale.new_empty(self.tiles * asked)}
        keys: dict[str, Any] = {"row_key": key, "place": place}
        probe: dict[str, Any] = {"product": scores, "order": order, "S": asked, "R": block}
        stats = Stats(row_lse=pair.scale.new_empty(asked))
        if self.spec.row_entropy:
            parts["entropy_part"] = torch.empty_like(parts["part"])
            stats.row_entropy = pair.scale.new_empty(asked)
        if self.rounding and self.spec.positive == "one":
            stats.row_pos = probe["own_part"] = pair.scale.new_zeros(asked)
        self.launch(kernels.probe_kernel, self.tiles * (asked // block), **probe, **parts, **keys)
        rows: dict[str, Any] = {"n": asked, "first_row": 0, "R": 1}
        rows |= {"T": min(PROBE_TILES, triton.next_power_of_2(self.tiles))} | parts
        self.launch(kernels.row_kernel, asked, **rows, row_lse=stats.row_lse, row_entropy=stats.row_entropy)
        if self.group is not None:
            stats = self.group.merged(stats)
        rows |= {"row_lse": stats.row_lse, "row_entropy": stats.row_entropy, "row_pos": stats.row_pos}
        rows |= {"pick_place": self._picked(None if pair.pick is None else pair.pick[those], place), "mass": mass}
        self.launch(kernels.choose_kernel, asked, **rows, **keys, all_rows=asked)
        pairs = (key[1:] >= 0).sum() * self.tiles
        return order, place, plans.too_many(mass[:, 1:] < 0, pairs, plans.PROBED_SHARE * self.share)

    def _masses(self, parts: dict[str, Tensor], i: slice) -> None:
        """The log-sum-exp of the rows in each tile and what else ``parts`` has, a chunk of tiles at a time."""
        sizes, rows = self.sizes, i.stop - i.start
        wide = cdiv(self.d * self.item, 16) * 16 // self.item
        programs = multiprocessors(self.device) * sizes.programs
        most = max(1, self.options.workspace_bytes * 3 // 8 // (wide * self.item * self.width))
        chunk = chunk_of_tiles(self.tiles, cdiv(rows, sizes.rows), programs, most)
        buffer = self._room(min(chunk * self.width, self.m), wide)[:, : self.d]
        features = min(GATHER_FEATURES, triton.next_power_of_2(self.d))
        gather: dict[str, Any] = {"order": self.order, "bias": self.bias, "out": buffer, "mean": self.mean}
        gather |= {"out_units": units(buffer), "R": min(GATHER_ROWS, self.width), "K": features}
        tile: dict[str, Any] = {"bias": self.bias, "order": self.order if self.spec.row_top else None, **parts}
        a_desc = tensor_descriptor(self.a[i], (sizes.rows, sizes.depth), self.exact)
        tile |= {"a_desc": a_desc, "n": rows, "row_shift": None}
        if self.pair.row_shift is not None:
            tile["row_shift"] = self.known["row_shift"][i]
        tile |= {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": programs}
        for t in pieces(self.tiles, chunk):
            first = t.start * self.width
            here = {"m": min(t.stop * self.width, self.m) - first, "first": first, "first_tile": t.start}
            self.launch(kernels.gather_kernel, (t.stop - t.start) * cdiv(self.d, features), **gather, **here)
            b_desc = tensor_descriptor(buffer[: here["m"]], (sizes.cols, sizes.depth), self.exact)
            self.launch(
                kernels.mass_kernel, programs, warps=sizes.warps, stages=sizes.stages, b_desc=b_desc, **tile, **here
            )

    def _room(self, cols: int, width: int) -> Tensor:
        """Memory for columns in their new order. The exact case may save exponentials there; then nothing is written here."""
        held = None if self.saved is None else self.saved.g(cols, width)
        return self.pair.a.new_empty((cols, width)) if held is None else held


def multiply(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, accumulated in float32."""
    if not out.is_cuda:  # the interpreter
        out.copy_(left.float() @ right.float())
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def places(order: Tensor) -> Tensor:
    """The place of each column in this order."""
    at = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return torch.empty_like(order).scatter_(0, order.long(), at)
