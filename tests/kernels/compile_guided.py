"""Compile the kernels with a second score matrix for many cards: `python -m tests.kernels.compile_guided`."""

from tests.kernels.compiling import cannot_compile, cards, compiled, compiled_tiles, row_for, show

from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.scores import FULL, GUIDE, bit_sum
from tilewise.kernels.triton_impl.two_pass.guide import STORED_BLOCK
from tilewise.kernels.triton_impl.two_pass.guide_kernels import (
    guided_forward_kernel,
    guided_gradient_kernel,
    stored_jsd_kernel,
)

ALL = {"bias", "guide_bias", "row_key", "row_shift", "guide_lse", "row_level", "row_hot_lse", "grad_row", "grad_pos"}
ALL |= {"grad_entropy", "grad_guide", "grad_hot", "bias_part", "row_norm", "guide_norm"}
# Log-sum-exps of float32 features are float64.
DOUBLES = dict.fromkeys(("row_lse", "guide_lse", "row_norm", "guide_norm"), "*fp64")
MASK = {"row_key", "row_skip", "col_skip", "row_limit", "grad_row", "grad_pos"}


def main() -> None:
    for capability, dtype, every in cards():
        row = row_for(capability, dtype)
        sizes, types = row.guided or row.gradient, DOUBLES if dtype == "fp32" else {}
        for use in GUIDE if every else ("jsd",):
            mask = use == "mask"
            if cannot_compile(capability) and mask:
                continue
            stats = bit_sum((bit.ROWS, True), (bit.ENTROPY, not mask), (bit.HOT, not mask), (bit.BIAS_COLS, not mask))
            score = bit.SKIP.value if mask else bit_sum((bit.BIAS, True), (bit.SOFTCAP, True))
            constants = {"D": 512, "E": 768, "GUIDE": GUIDE[use], "STATS": stats, "TERMS": stats, "SCORE": score}
            constants |= {"GUIDE_SCORE": 0 if mask else score, "POSITIVE": bit.ONE.value, "EXACT": FULL}
            for kernel in (guided_forward_kernel, guided_gradient_kernel):
                made = compiled_tiles(kernel, constants, MASK if mask else ALL, dtype, capability, sizes, types=types)
                show(capability, kernel.__name__, made, sizes.programs, loss=use, dtype=dtype)
        # A Kullback-Leibler divergence whose scores were saved
        constants |= {"GUIDE": GUIDE["kl"], "GUIDE_SCORE": constants["SCORE"]}
        made = compiled_tiles(
            guided_gradient_kernel, constants, ALL | {"x", "y"}, dtype, capability, sizes, types=types
        )
        show(capability, "guided_gradient_kernel", made, sizes.programs, loss="kl, saved", dtype=dtype)
        # A Jensen-Shannon divergence in one process: scores are stored, and the norms are not known yet.
        constants["GUIDE"] = GUIDE["jsd"]
        present = ALL - {"row_norm", "guide_norm"} | {"x_desc", "y_desc"}
        made = compiled_tiles(guided_forward_kernel, constants, present, dtype, capability, sizes, types=types)
        show(capability, "guided_forward_kernel", made, sizes.programs, loss="jsd, stored", dtype=dtype)
        how = {"warps": 8, "types": types}
        made = compiled(stored_jsd_kernel, {"BLOCK": STORED_BLOCK}, {"row_shift"}, "fp32", capability, **how)
        show(capability, "stored_jsd_kernel", made, dtype=dtype)


if __name__ == "__main__":
    main()
