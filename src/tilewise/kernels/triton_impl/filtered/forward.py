"""Forward of the filter: column order, a sample of the rows, the mass of each row in each tile, and what to drop."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.filter_plan import row_steps, tile_count
from tilewise.kernels.host_scalar import HostScalar
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import FilterPlan, Pair, PairSpec, Stats
from tilewise.kernels.triton_impl.filtered import kernels
from tilewise.kernels.triton_impl.launch.call import Call, cdiv, pieces, vector
from tilewise.kernels.triton_impl.launch.prepared import Prepared
from tilewise.kernels.triton_impl.sizes import mass_sizes, multiprocessors
from tilewise.kernels.triton_impl.two_pass import strategy as two_pass
from tilewise.kernels.triton_impl.two_pass.backward import product
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

GATHER_ROWS, GATHER_FEATURES = 32, 256
CHOOSE_ROWS, CHOOSE_TILES = 32, 64
PLACES = 1024
PROBE_ROWS, PROBE_TILES = 32, 1024
WORTH_PROBING = 2**38  # multiply-adds of one product; below, launching both ways costs more than is saved


def units(features: Tensor) -> int:
    """The row stride in units of 16 bytes; rows of `readable` features start at such addresses."""
    return features.stride(0) * features.element_size() // 16


def chunk_of_tiles(tiles: int, row_tiles: int, programs: int, most: int) -> int:
    """How many column tiles to gather at once: the number up to ``most`` that leaves the fewest programs idle.

    >>> chunk_of_tiles(1000, 64, 132, 80)
    66
    """

    def rounds(chunk: int) -> int:
        return tiles // chunk * cdiv(row_tiles * chunk, programs) + cdiv(row_tiles * (tiles % chunk), programs)

    most = min(most, tiles)
    return min(range(max(1, most // 2), most + 1), key=lambda chunk: (rounds(chunk), -chunk))


class FilterForward:
    """One pass over the columns in their new order, for as many rows at a time as their masses fit the workspace."""

    def __init__(self, pair: Pair, spec: PairSpec, options: TileOptions, save: bool = False) -> None:
        self.pair, self.spec, self.options, self.save = pair, spec, options, save
        self.call = Call.of(pair, spec, options)
        self.a, self.b, self.device = self.call.a, self.call.b, pair.a.device
        self.n, self.m, self.d = pair.a.shape[0], pair.b.shape[0], pair.a.shape[1]
        self.width, self.tiles = plans.tile_width(self.m), tile_count(self.m)
        self.sizes = mass_sizes(self.device, pair.a.dtype, self.width)
        # A kept pair costs the same for a tile of any width.
        self.share = self.width / plans.WIDEST_TILE if self.device.type == "cuda" else 1.0
        self.saved: SavedColumns | None = None

    def run(self) -> tuple[Stats, FilterPlan, SavedColumns | None]:
        """Statistics and plan. The host does not wait; only the device knows which case is computed.

        The kernels of the exact loss are launched first: their launches are replayed, so the device has work soon.
        """
        pair, asked = self.pair, self._sample_size()
        # (1,) int32: the exact case is faster, as the probe found, or the scores are rounded too coarsely for the filter.
        self.keep_all = plans.rounding_exceeds(pair, self.options.filter_tolerance)
        if asked:
            self.order, self.place, too_many = self._probe(asked)
            self.keep_all |= too_many
        else:
            self.order = plans.order_columns(pair)  # (m,) int32, the column at each place
            self.place = self._places(self.order)  # (m,) int32, the place of each column
        stats = self._exact(self.keep_all)
        if self.saved is not None and self.keep_all.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.saved.probed_exact = HostScalar(self.keep_all)
        assert stats.row_lse is not None
        self.bias = None if pair.bias is None else pair.bias[self.order.long()]
        mass = pair.a.new_empty((self.tiles, self.n))
        self.mean = pair.a.new_empty((self.tiles, self.d))
        step = row_steps(self.n, self.tiles, self.options)
        part = pair.scale.new_empty(self.tiles * min(step, self.n))
        for i in pieces(self.n, step):
            self._masses(part, i)
            choose = self._chooser(self.place, CHOOSE_ROWS, CHOOSE_TILES)
            choose.put({"part": part, "row_key": vector(pair.row_key), "row_lse": stats.row_lse})
            choose.put({"mass": mass, "skip_if": self.keep_all, "n": i.stop - i.start})
            choose.put({"first_row": i.start, "all_rows": self.n}).launch(cdiv(i.stop - i.start, CHOOSE_ROWS))
        kept = (mass < 0).sum(1, dtype=torch.int32)
        keep_all = plans.too_many(kept, mass.numel(), self.share) | self.keep_all
        plan = FilterPlan(order=self.order, mass=mass, mean=self.mean, kept=kept, keep_all=keep_all)
        return stats, plan, self.saved

    def _exact(self, keep_all: Tensor) -> Stats:
        """The statistics of the exact case, computed if the device finds ``keep_all`` set."""
        pair = dataclasses.replace(self.pair, a=self.a, b=self.b)  # a copy, if one was needed, serves both cases
        if not self.save:
            return two_pass.forward(pair, self.spec, self.options, keep_all)
        stats, self.saved = two_pass.forward_saving(pair, self.spec, self.options, keep_all)
        return stats

    def _sample_size(self) -> int:
        """The number of rows to probe; 0 for a small call."""
        if self.n * self.m * self.d < WORTH_PROBING:
            return 0
        return plans.sample_size(self.n, self.m, self._sample_dtype().itemsize, self.options)

    def _sample_dtype(self) -> torch.dtype:
        """The type of sampled scores. float16 lacks the range of products."""
        return torch.float32 if self.pair.a.dtype == torch.float16 else self.pair.a.dtype

    def _probe(self, asked: int) -> tuple[Tensor, Tensor, Tensor]:
        """The order of the columns, their places, and whether a sample of ``asked`` rows keeps too many pairs."""
        pair, m, dtype = self.pair, self.m, self._sample_dtype()
        assert pair.row_key is not None
        those = plans.sample_of(self.n, asked)
        sample, key = self.a[those].clone(), pair.row_key[those].contiguous()
        sample[0] = plans.mean_row(pair)  # orders the columns; not counted in the result
        scores = pair.a.new_empty((m, asked), dtype=dtype)
        with matmul_precision("high"):
            product(scores, self.b, sample.T, True)
        order = plans.order_by(scores[:, 0], pair)
        place = self._places(order)
        part, mass = pair.scale.new_empty(self.tiles * asked), pair.a.new_empty((self.tiles, asked))
        probe = self.call.prepare(kernels.probe_kernel)
        probe.put({"product": scores, "order": order, "scale": pair.scale, "bias": vector(pair.bias), "part": part})
        probe.put({"softcap": self.spec.softcap, "m": m, "SCORE": self.call.score_bits, "W": self.width, "S": asked})
        block = min(PROBE_ROWS, asked)
        probe.put({"R": block}).launch(self.tiles * (asked // block))
        choose = self._chooser(place, 1, min(PROBE_TILES, triton.next_power_of_2(self.tiles)))
        choose.put({"part": part, "row_key": vector(key), "mass": mass, "n": asked})
        choose.put({"row_lse": pair.scale.new_empty(asked), "first_row": 0, "all_rows": asked}).launch(asked)
        pairs = (key[1:] >= 0).sum() * self.tiles
        return order, place, plans.too_many(mass[:, 1:] < 0, pairs, plans.PROBED_SHARE * self.share)

    def _places(self, order: Tensor) -> Tensor:
        """The place of each column in this order."""
        place = torch.empty_like(order)
        places = self.call.prepare(kernels.places_kernel)
        places.put({"order": order, "place": place, "m": self.m, "BLOCK": PLACES}).launch(cdiv(self.m, PLACES))
        return place

    def _masses(self, part: Tensor, i: slice) -> None:
        """The log-sum-exp of the rows in each tile, a chunk of tiles at a time."""
        sizes, rows, item = self.sizes, i.stop - i.start, self.pair.a.element_size()
        wide = cdiv(self.d * item, 16) * 16 // item
        programs = multiprocessors(self.device) * sizes.programs
        most = max(1, self.options.workspace_bytes * 3 // 8 // (wide * item * self.width))
        chunk = chunk_of_tiles(self.tiles, cdiv(rows, sizes.rows), programs, most)
        buffer = self._room(min(chunk * self.width, self.m), wide)[:, : self.d]
        gather = self.call.prepare(kernels.gather_kernel)
        gather.put({"b": self.b, "order": self.order, "bias": self.bias, "out": buffer, "mean": self.mean})
        gather.put({"skip_if": self.keep_all, "b_units": units(self.b), "out_units": units(buffer)})
        gather.put({"UNIT": 16 // item, "D": self.d, "W": self.width})
        features = min(GATHER_FEATURES, triton.next_power_of_2(self.d))
        gather.put({"R": min(GATHER_ROWS, self.width), "K": features})
        tile = self.call.prepare(kernels.mass_kernel, sizes.warps, sizes.stages)
        a_desc = TensorDescriptor.from_tensor(self.a[i], [sizes.rows, sizes.depth])
        shift = self.pair.row_shift
        tile.put({"a_desc": a_desc, "scale": self.pair.scale, "bias": self.bias, "softcap": self.spec.softcap})
        tile.put({"row_shift": None if shift is None else vector(shift[i]), "part": part, "n": rows, "D": self.d})
        tile.put({"SCORE": self.call.score_bits, "R": sizes.rows, "C": sizes.cols, "K": sizes.depth})
        tile.put({"GROUP": sizes.group, "PROGRAMS": programs, "EXACT": self.call.exact, "skip_if": self.keep_all})
        described = 0
        for t in pieces(self.tiles, chunk):
            first = t.start * self.width
            cols = min(t.stop * self.width, self.m) - first
            if cols != described:
                tile.put({"b_desc": TensorDescriptor.from_tensor(buffer[:cols], [sizes.cols, sizes.depth])})
                described = cols
            here = {"m": cols, "first": first, "first_tile": t.start}
            gather.put(here).launch((t.stop - t.start) * cdiv(self.d, features))
            tile.put(here).launch(programs)

    def _room(self, cols: int, width: int) -> Tensor:
        """Memory for columns in their new order. The exact case may save exponentials there; then nothing is written here."""
        held = None if self.saved is None else self.saved.buffer
        if held is None or held.numel() < cols * width:
            return self.pair.a.new_empty((cols, width))
        return held[: cols * width].view(cols, width)

    def _chooser(self, place: Tensor, rows: int, tiles: int) -> Prepared:
        """The kernel that chooses what rows drop, with the arguments that are the same for all rows."""
        tolerance = self.options.filter_tolerance
        choose = self.call.prepare(kernels.choose_kernel)
        choose.put({"tolerance": tolerance, "usable": tolerance * plans.MARGIN, "tiles": self.tiles, "W": self.width})
        choose.put({"place": place, "m": self.m, "col_start": self.pair.col_start})
        return choose.put({"HALVINGS": plans.HALVINGS, "R": rows, "T": tiles})
