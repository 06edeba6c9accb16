"""Compile the two-pass kernels for many cards: `python -m tests.kernels.compile_two_pass`. See `compiling`."""

from tests.kernels.compiling import cannot_compile, cards, compiled, compiled_tiles, row_for, show

from tilewise.kernels.spec import PairSpec
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.scores import FULL, bit_sum
from tilewise.kernels.triton_impl.sizes import TF32
from tilewise.kernels.triton_impl.statistics import TABLE, forward_functions, row_terms
from tilewise.kernels.triton_impl.two_pass import backward_kernels as backward
from tilewise.kernels.triton_impl.two_pass import forward_kernels as forward
from tilewise.kernels.triton_impl.two_pass import positive_kernels as positive
from tilewise.kernels.triton_impl.two_pass import row_product, saved
from tilewise.kernels.triton_impl.two_pass.forward import MERGE_BLOCK

DIAGONAL, ONE, MANY, PICKED = (kind.value for kind in (bit.DIAGONAL, bit.ONE, bit.MANY, bit.PICKED))
MERGE = {"ROW_FIRST": False, "COL_FIRST": False, "LAST": True, "BLOCK": MERGE_BLOCK}
BOTH = {
    "col_part",
    "row_lse",
    "col_lse",
    "grad_row",
    "grad_col",
    "grad_pos",
    "row_share",
    "col_share",
    "span",
}
ROWS = {"row_lse", "grad_row", "grad_pos"}
SAVED = ROWS | {"row_key", "peaks", "e_desc", "span", "row_factor", "own"}


def of(*names):
    return bit_sum(*((getattr(bit, name), True) for name in names))


# loss -> (STATS, TERMS, SCORE, POSITIVE, WIDE, optional arguments that are not None)
LOSSES = {
    "clip": (of("ROWS", "COLS"), of("ROWS", "COLS"), 0, DIAGONAL, False, BOTH | {"peaks"}),
    "clip, wide": (of("ROWS", "COLS"), of("ROWS", "COLS"), 0, DIAGONAL, True, BOTH | {"peaks"}),
    "siglip": (
        *(of("SOFTPLUS"), of("SOFTPLUS", "BIAS_TOTAL"), of("ONE_BIAS"), DIAGONAL, True),
        {"bias", "bias_part", "grad_row", "row_softplus"},
    ),
    "cross entropy": (
        *(of("ROWS", "ROW_SUM"), of("ROWS", "ROW_SUM"), of("BIAS", "SOFTCAP"), ONE, True),
        ROWS | {"bias", "row_key", "col_weight", "row_sum", "grad_sum", "peaks"},
    ),
    "cross entropy, bias": (
        *(of("ROWS"), of("ROWS", "BIAS_COLS"), of("BIAS", "SOFTCAP"), ONE, True),
        ROWS | {"bias", "bias_part", "row_key", "peaks"},
    ),
    "cross entropy, saved": (of("ROWS"), of("ROWS"), 0, ONE, True, SAVED),
    "cross entropy, if not filtered": (of("ROWS"), of("ROWS"), 0, ONE, True, SAVED | {"only_if"}),
    "tokens": (
        *(of("ROWS"), of("ROWS", "BIAS_COLS")),
        *(of("BIAS", "SOFTCAP"), ONE, True),
        ROWS
        | {"bias", "bias_part", "row_key", "row_entropy", "row_sum_sq", "grad_entropy", "grad_square"}
        | {"row_top", "row_top_col"},
    ),
    "tokens, picked": (
        *(of("ROWS"), of("ROWS", "BIAS_COLS")),
        *(of("BIAS", "SOFTCAP"), ONE, True),
        ROWS
        | {"bias", "bias_part", "row_key", "row_entropy", "row_sum_sq", "grad_entropy", "grad_square"}
        | {"row_shift", "row_scale", "own"},
    ),
    "all but the picked": (
        *(of("ROWS"), of("ROWS", "BIAS_COLS"), of("BIAS", "SOFTCAP"), 0, True),
        ROWS - {"grad_pos"} | {"bias", "bias_part", "row_shift", "row_scale", "picked"},
    ),
    "tokens, saved": (
        *(of("ROWS"), of("ROWS"), 0, ONE, True),
        ROWS
        | {"row_key", "row_entropy", "row_sum_sq", "grad_entropy", "grad_square", "row_top", "row_top_col"}
        | {"e_desc", "reference"},
    ),
    "tokens, by default": (
        *(of("ROWS"), of("ROWS"), 0, ONE, True),
        ROWS | {"row_key", "row_entropy", "grad_entropy", "row_top", "row_top_col", "e_desc", "reference"},
    ),
    "log-probability and entropy": (  # of a head in reinforcement learning
        *(of("ROWS"), of("ROWS"), 0, ONE, True),
        ROWS | {"row_key", "row_entropy", "grad_entropy", "e_desc", "reference"},
    ),
    "nt_xent": (
        *(of("ROWS", "COLS", "MIRROR"), of("ROWS", "COLS", "MIRROR"), of("MASK_SELF"), ONE, False),
        BOTH | {"row_key", "peaks", "grad_pos_col"},
    ),
    "supcon": (
        *(of("ROWS", "COLS", "MIRROR"), of("ROWS", "COLS", "MIRROR"), of("MASK_SELF"), MANY, False),
        BOTH | {"row_key", "col_key", "row_shift", "col_shift", "row_pos", "col_pos", "grad_pos_col"},
    ),
    "info_nce with ids": (
        *(of("ROWS", "COLS"), of("ROWS", "COLS"), of("SKIP"), DIAGONAL, False),
        BOTH | {"row_skip", "col_skip"},
    ),
}
TOKENS = "tokens, saved", "tokens, by default", "log-probability and entropy"
SAVING = "cross entropy, saved", "cross entropy, if not filtered", *TOKENS  # of wide features
WIDE = "cross entropy", "cross entropy, bias", *SAVING, "tokens", "tokens, picked", "supcon", "info_nce with ids"
WIDE += ("all but the picked",)
QUICK = "clip", "cross entropy, saved"
ON_HOPPER = "clip, wide", "cross entropy, bias", "cross entropy, if not filtered", "tokens, picked"  # as others
ON_HOPPER += ("all but the picked", "tokens, by default")
ONE_SHIFT = {"row_shift"}  # of the rows, and none of the columns
FEW = {"forward_kernel", "merge_kernel", "gradient_kernel"}  # those of `QUICK`


def functions_of(present):
    """The functions of the statistics whose outputs, and whose gradients, are among these arguments."""
    spec = PairSpec(row_lse=True, **{name: name in present for name in TABLE})
    return forward_functions(spec) | {"ROW_TERMS": row_terms(present)}


def kernels_over_tiles(loss, stats, sizes, wide_sizes):
    """(kernel, sizes) of a loss."""
    first = (forward.forward_kernel,)
    if loss in ("clip", "siglip"):
        first += (forward.repair_kernel,)
    return [*((kernel, sizes) for kernel in first), (backward.gradient_kernel, wide_sizes)]


def small_kernels(loss, kind, sizes):
    """(kernel, constants, optional arguments that are not None)."""
    found = [(forward.merge_kernel, MERGE | {"R": sizes.rows, "C": sizes.cols}, set())]
    if loss == "clip":
        found += [(*found[0][:2], ONE_SHIFT)]
    if kind in (DIAGONAL, ONE):
        found += [(positive.positive_kernel, {}, {"num_positives"}), (positive.positive_gradient_kernel, {}, set())]
    if loss == "tokens, picked":
        picked = {"POSITIVE": PICKED}
        found += [(positive.positive_kernel, picked, set()), (positive.positive_gradient_kernel, picked, set())]
    if loss == "cross entropy, saved":
        for more in (set(), {"entry"}, {"entry", "grad_picked"}):
            found += [(saved.factor_kernel, {"BLOCK": saved.FACTOR_ROWS, "WIDTH": saved.WIDTH}, more)]
        found += [(saved.check_kernel, {"BLOCK": saved.CHECKED_ROWS}, set())]
    if loss in TOKENS:
        found += [(saved.saved_gradient_kernel, {"R": saved.GRADIENT_ROWS, "C": sizes.cols}, set())]
    return found


def sizes_of(capability, dtype, every):
    """(loss, sizes in forward, sizes in backward) of all losses, with narrow and with wide features."""
    row = row_for(capability, dtype)
    narrow = row.forward, row.gradient
    wide = row.forward_wide or row.forward, row.gradient_wide or row.gradient
    found = [(loss, *narrow) for loss in LOSSES if loss not in SAVING]
    found += [(loss, *wide) for loss in (WIDE if wide != narrow else SAVING)]
    if capability != 90:
        found = [case for case in found if case[0] not in ON_HOPPER]
    if dtype == TF32:  # only bfloat16 saves columns
        found = [case for case in found if case[0] not in SAVING]
    return found if every else [case for case in found if case[0] == "clip" or (case[0] in QUICK and wide != narrow)]


def main() -> None:
    for capability, dtype, every in cards():
        for loss, sizes, gradient_sizes in sizes_of(capability, dtype, every):
            stats, terms, score, kind, wide, present = LOSSES[loss]
            if cannot_compile(capability) and (kind == MANY or score & bit.SKIP.value):
                continue
            shared = {"D": 512, "SCORE": score, "POSITIVE": kind, "EXACT": FULL, "STATS": stats, "TERMS": terms}
            shared["WIDE"] = wide
            shared |= functions_of(present)
            shared["STRIP"] = sizes.strip if "peaks" in present and stats & bit.COLS.value else 1
            types = {"row_key": "*i32"} if kind == MANY else {}
            for kernel, own in kernels_over_tiles(loss, stats, sizes, gradient_sizes):
                if not every and kernel.__name__ not in FEW:
                    continue
                made = compiled_tiles(kernel, shared, present, dtype, capability, own, types=types)
                show(capability, kernel.__name__, made, own.programs, loss=loss, dtype=dtype)
            for kernel, constants, more in small_kernels(loss, kind, sizes) if not cannot_compile(capability) else ():
                if not every and kernel.__name__ not in FEW:
                    continue
                constants = shared | {"P": 64, "K": 64} | constants
                made = compiled(kernel, constants, present | more, dtype, capability)
                name = f"{loss}, one shift" if more == ONE_SHIFT else loss
                show(capability, kernel.__name__, made, loss=name, dtype=dtype)
        if every:
            row = row_for(capability, dtype)
            for sizes in {row.gradient, row.gradient_wide or row.gradient}:
                constants = {
                    "D": 512,
                    "R": sizes.rows,
                    "W": sizes.cols,
                    "K": sizes.depth,
                    "EXACT": FULL,
                    "FIRST": False,
                }
                blocks = {"g_desc": (sizes.rows, sizes.depth), "b_desc": (sizes.depth, sizes.cols)}
                how = {"blocks": blocks, "warps": sizes.warps, "stages": sizes.stages, "types": {"out": "*fp32"}}
                made = compiled(row_product.row_product_kernel, constants, set(), dtype, capability, **how)
                show(capability, "row_product_kernel", made)


if __name__ == "__main__":
    main()
