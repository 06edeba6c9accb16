"""Compile the filter kernels for many cards: `python -m tests.kernels.compile_filtered`. See `compiling`."""

import dataclasses

import triton
from tests.kernels.compiling import cards, compiled, compiled_tiles, row_for, show

from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.filtered import backward_kernels as backward
from tilewise.kernels.triton_impl.filtered import forward_kernels as forward
from tilewise.kernels.triton_impl.filtered import rounding_kernels as rounding
from tilewise.kernels.triton_impl.scores import FULL, bit_sum

BIAS_AND_CAP = bit_sum((bit.BIAS, True), (bit.SOFTCAP, True))
OPTIONAL = {"skip_if", "g", "u"}
WITH_BIAS = OPTIONAL | {"bias", "row_shift", "bias_share", "bias_out"}
TOKENS = {
    "order",
    "entropy_part",
    "own_part",
    "top_part",
    "top_col_part",
    "row_pos",
    "row_entropy",
    "surprise",
    "grad_entropy",
    "pick",
    "pick_place",
    "grad_picked",
}


def main() -> None:
    for capability, dtype, every in cards():
        row = row_for(capability, dtype)
        # (columns of a tile, features, SCORE, whether entropy and largest score are wanted)
        cases = [(256, 2304, 0, False), (256, 2304, 0, True)]
        if every or (capability, dtype) == (89, "fp32"):
            cases += [(128, 2304, 0, False), (256, 2304, BIAS_AND_CAP, False)]
        for width, d, score, tokens in cases:
            present, named = WITH_BIAS if score else OPTIONAL, {"dtype": dtype, "width": width, "tokens": tokens}
            present = present | TOKENS if tokens else present
            shared = {"D": d, "UNIT": 4 if dtype == "fp32" else 8, "W": width, "EXACT": FULL, "SCORE": score}
            shared["ROUNDING"] = tokens
            masses = dataclasses.replace(row.filter_masses if width == 256 else row.filter_masses_narrow, cols=width)
            made = compiled_tiles(forward.mass_kernel, shared, present, dtype, capability, masses)
            show(capability, "mass_kernel", made, masses.programs, **named)
            found = over_pairs(row.filter_pairs, d)[: 1 if tokens else 2]
            if every and width == 256:
                found += small_kernels(width, d)
            for kernel, sizes, warps, stages in found:
                there = present - ({"skip_if", "surprise"} if sizes.get("T") == 1024 else set())
                made = compiled(kernel, shared | sizes, there, dtype, capability, warps=warps, stages=stages)
                show(capability, kernel.__name__, made, **named)


def over_pairs(pairs, d):
    """(kernel, constants, warps, stages) of the kernels over kept pairs."""
    column = {"R": pairs.rows, "K": min(pairs.columns, max(16, triton.next_power_of_2(d)))}
    return [
        (backward.pair_kernel, {"R": pairs.rows, "K": pairs.depth}, pairs.warps, pairs.stages),
        (backward.column_kernel, column, pairs.column_warps, pairs.stages),
    ]


def small_kernels(width, d):
    """(kernel, constants, warps, stages) of the others."""
    gather = {"R": min(32, width), "K": min(256, triton.next_power_of_2(d))}
    return [
        (rounding.norm_kernel, gather | {"R": 8}, 4, 2),
        (rounding.exceeds_kernel, {"BLOCK": 4096}, 8, 2),
        (forward.gather_kernel, gather, 4, 2),
        (forward.probe_kernel, {"S": 128, "R": 32}, 4, 2),
        (forward.row_kernel, {"R": 1, "T": 1024}, 4, 2),  # of a sample
        (forward.row_kernel, {"R": 32, "T": 64}, 4, 2),
        (forward.choose_kernel, {"HALVINGS": 12, "R": 1, "T": 1024}, 4, 2),  # of a sample
        (forward.choose_kernel, {"HALVINGS": 12, "R": 32, "T": 64}, 4, 2),
        (forward.top_kernel, {"R": 32, "T": 64}, 4, 2),
        (backward.plan_kernel, {"R": 64, "BLOCK": 1024}, 4, 2),
        (backward.add_rows_kernel, {"K": 1024}, 4, 2),
    ]


if __name__ == "__main__":
    main()
