"""Compile the kernels that count ranks for cards that are not here: `python -m tests.kernels.compile_ranks`.

As `tests.kernels.compile_kernels` does for the others.
"""

import json

from tests.kernels.compile_filtered import compiled
from tests.kernels.resources import stack_bytes

from tilewise.kernels.triton_impl import ranks
from tilewise.kernels.triton_impl.launch.call import FULL
from tilewise.kernels.triton_impl.sizes import SAFE, TABLE

CARDS = {
    "hopper": (90, TABLE[9, 2][0], "bf16"),
    "hopper, float32": (90, TABLE[9, 4][0], "fp32"),
    "ampere": (80, TABLE[8, 2][0], "bf16"),
    "ampere, float32": (80, TABLE[8, 4][0], "fp32"),
    "ada": (89, SAFE[2][0], "bf16"),
    "blackwell": (100, TABLE[10, 2][0], "fp16"),
}
TYPES = dict.fromkeys(("row_place", "row_count", "col_place", "col_count", "hide"), "*i32") | {"hidden": "i32"}
TYPES |= dict.fromkeys(("row_ids", "col_ids", "row_best", "col_best"), "*i64")
ONE_WAY = {"col_score", "col_place", "col_count", "hide"}


def main() -> None:
    for card, (capability, sizes, dtype) in CARDS.items():
        desc = {"a_desc": (sizes.rows, sizes.depth), "b_desc": (sizes.cols, sizes.depth)}
        tile = {"D": 512, "R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "EXACT": FULL}
        many = tile | {"GROUP": sizes.group, "PROGRAMS": 264}
        for kernel, what, constants, absent in (
            (ranks.count_kernel, "one way", many | {"ANSWERS": 1}, ONE_WAY),
            (ranks.count_kernel, "both ways", many | {"ANSWERS": 1}, {"hide"}),
            (ranks.count_kernel, "everything", many | {"ANSWERS": ranks.ANSWERS_AT_ONCE}, set()),
            (ranks.best_kernel, "one way", many, {"col_best", "hide"}),
            (ranks.best_kernel, "everything", many, set()),
            (ranks.diagonal_kernel, "", tile, set()),
        ):
            made = compiled(kernel, constants, absent, dtype, desc, capability, sizes.warps, sizes.stages, TYPES)
            programs = 1 if kernel is ranks.diagonal_kernel else sizes.programs
            line = {"card": card, "capability": capability, "kernel": kernel.__name__, "what": what}
            line |= {"shared": made.metadata.shared, "programs": programs, "stack": stack_bytes(made.asm["cubin"])}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
