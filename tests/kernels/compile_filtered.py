"""Compile the filter kernels for many cards: `python -m tests.kernels.compile_filtered`. See `compiling`."""

import dataclasses

import triton
from tests.kernels.compiling import compiled, compiled_tiles, row_for, show

from tilewise.kernels.triton_impl.filtered import kernels
from tilewise.kernels.triton_impl.launch.call import FULL

OPTIONAL = {"skip_if", "g", "u"}
WITH_BIAS = OPTIONAL | {"bias", "row_shift", "bias_share", "bias_out"}
# (capability, type, features, columns of a tile)
CARDS = [
    (90, "bf16", 2304, 256),
    (90, "bf16", 2304, 128),
    (90, "fp16", 96, 16),
    (90, "fp32", 1024, 256),
    (80, "bf16", 2304, 256),
    (89, "bf16", 2304, 256),
    (89, "fp32", 1024, 256),
    (89, "fp32", 1024, 128),
    (100, "bf16", 2304, 256),
]


def main() -> None:
    for capability, dtype, d, width in CARDS:
        row = row_for(capability, dtype)
        masses = dataclasses.replace(row.filter_masses if width == 256 else row.filter_masses_narrow, cols=width)
        pairs, item = row.filter_pairs, 4 if dtype == "fp32" else 2
        column = {"R": pairs.rows, "K": min(pairs.columns, max(16, triton.next_power_of_2(d)))}
        gather = {"R": min(32, width), "K": min(256, triton.next_power_of_2(d))}
        shared = {"D": d, "UNIT": 16 // item, "W": width, "EXACT": FULL}
        for score in (0, 3) if (capability, dtype, width) == (90, "bf16", 256) else (0,):
            present, named = WITH_BIAS if score else OPTIONAL, {"dtype": dtype, "width": width}
            made = compiled_tiles(kernels.mass_kernel, shared | {"SCORE": score}, present, dtype, capability, masses)
            show(capability, "mass_kernel", made, masses.programs, **named)
            for kernel, sizes, warps, stages in (
                (kernels.gather_kernel, gather, 4, 2),
                (kernels.probe_kernel, {"S": 128, "R": 32}, 4, 2),
                (kernels.choose_kernel, {"HALVINGS": 12, "R": 1, "T": 1024}, 4, 2),  # of a sample
                (kernels.choose_kernel, {"HALVINGS": 12, "R": 32, "T": 64}, 4, 2),
                (kernels.plan_kernel, {"R": 64, "BLOCK": 1024}, 4, 2),
                (kernels.pair_kernel, {"R": pairs.rows, "K": pairs.depth}, pairs.warps, pairs.stages),
                (kernels.column_kernel, column, pairs.column_warps, pairs.stages),
                (kernels.add_rows_kernel, {"K": 1024}, 4, 2),
            ):
                there = present - ({"skip_if"} if sizes.get("T") == 1024 else set())
                constants = shared | sizes | {"SCORE": score}
                made = compiled(kernel, constants, there, dtype, capability, warps=warps, stages=stages)
                show(capability, kernel.__name__, made, **named)


if __name__ == "__main__":
    main()
