"""Compile the kernels of retrieval for many cards: `python -m tests.kernels.compile_ranks`. See `compiling`."""

from tests.kernels.compiling import cards, compiled, compiled_tiles, row_for, show

from tilewise.kernels.triton_impl import nearest, ranks
from tilewise.kernels.triton_impl.scores import FULL

COLUMNS, ALL = {"col_score", "col_place", "col_count"}, {"col_score", "col_place", "col_count", "col_best", "hide"}

WANTED = {"below", "row_ids", "col_ids", "hide"}


def main() -> None:
    for capability, dtype, every in cards():
        sizes = row_for(capability, dtype).forward
        work = [(ranks.count_kernel, ALL, ranks.ANSWERS_AT_ONCE), (nearest.search_kernel, set(), 1)]
        if every:
            work += [
                (ranks.best_kernel, ALL, 1),
                (nearest.search_kernel, WANTED, 1),
                (ranks.count_kernel, set(), 1),
                (ranks.count_kernel, COLUMNS, 1),
                (ranks.best_kernel, set(), 1),
                (ranks.diagonal_kernel, set(), 1),
            ]
        for kernel, present, answers in work:
            constants = {"D": 512, "EXACT": FULL, "ANSWERS": answers, "PTX": True}
            made = compiled_tiles(kernel, constants, present, dtype, capability, sizes)
            programs = 1 if kernel is ranks.diagonal_kernel else sizes.programs
            more = {"dtype": dtype, "present": sorted(present)}
            if kernel is nearest.search_kernel:
                here, copies = (made.asm[kind].count("@p atom.global.relaxed") for kind in ("ptx", "ttgir"))
                more["reserved"] = nearest.PARTS * 32 * sizes.warps * here // copies
                more["scores"] = sizes.rows * sizes.cols
            show(capability, kernel.__name__, made, programs, **more)
        if every:
            made = compiled(nearest.select_kernel, {"WIDTH": 512}, set(), dtype, capability, warps=1, stages=1)
            show(capability, "select_kernel", made)


if __name__ == "__main__":
    main()
