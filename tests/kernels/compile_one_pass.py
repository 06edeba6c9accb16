"""Compile the one-pass kernels for many cards: `python -m tests.kernels.compile_one_pass`. See `compiling`."""

from tests.kernels.compiling import cannot_compile, cards, compiled, compiled_tiles, row_for, show

from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.one_pass import product_kernels, sigmoid_kernels, softmax_kernels
from tilewise.kernels.triton_impl.one_pass.softmax import MANY_PARTS
from tilewise.kernels.triton_impl.scores import FULL, bit_sum
from tilewise.kernels.triton_impl.two_pass import rounded_positives

DIAGONAL, ONE = bit.DIAGONAL.value, bit.ONE.value
BIAS_AND_CAP, SKIP = bit_sum((bit.BIAS, True), (bit.SOFTCAP, True)), bit.SKIP.value
REPAIR, MAXIMA = softmax_kernels.REPAIR.value, softmax_kernels.MAXIMA.value
ONE_BIAS, BIAS_TOTAL = bit.ONE_BIAS.value, bit.BIAS_TOTAL.value
# name -> (kernel, POSITIVE, SCORE, MODE or TERMS, optional arguments that are not None)
TILED = {
    "exponents of cross entropy": (softmax_kernels.exponent_kernel, ONE, 0, 0, {"row_key"}),
    "exponents, bias and softcap": (softmax_kernels.exponent_kernel, ONE, BIAS_AND_CAP, 0, {"row_key", "bias"}),
    "exponents of info_nce with ids": (softmax_kernels.exponent_kernel, DIAGONAL, SKIP, 0, {"row_skip", "col_skip"}),
    "repaired exponents": (softmax_kernels.exponent_kernel, ONE, 0, REPAIR, {"row_key"}),
    "repaired maxima": (softmax_kernels.exponent_kernel, ONE, 0, REPAIR + MAXIMA, {"row_key"}),
    "repaired sigmoid": (sigmoid_kernels.sigmoid_kernel, DIAGONAL, ONE_BIAS, 0, {"bias"}),
    "sigmoid": (sigmoid_kernels.sigmoid_kernel, DIAGONAL, ONE_BIAS, BIAS_TOTAL, {"bias", "g_desc", "bias_part"}),
}
ROWS = {"SCORE": bit.SOFTCAP.value, "POSITIVE": ONE, "MANY_PARTS": MANY_PARTS, "BLOCK": 32}
RUNS = {"D": 4096, "STRIDE": 4096, "RUN": 64, "BLOCK": 4, "WIDTH": 512}
FINISH = {"D": 4096, "BLOCK": 8, "WIDTH": 256}
# name -> (kernel, constants, optional arguments that are not None)
SMALL = {
    "start": (softmax_kernels.start_kernel, {"BLOCK": 1024}, {"square"}),
    "shift": (softmax_kernels.shift_kernel, {"MANY_PARTS": MANY_PARTS, "BLOCK": 32}, set()),
    "rows": (softmax_kernels.rows_kernel, ROWS, {"square", "row_key"}),
    "finish": (
        product_kernels.finish_rows_kernel,
        FINISH,
        {"b", "total", "entry", "column", "out", "scaled", "dots"},
    ),
    "finish, only scaled rows": (product_kernels.finish_rows_kernel, FINISH, {"scaled"}),
    "positives": (rounded_positives.positives_kernel, RUNS | {"EPS": 2.0**-7}, {"scale"}),
    "positives of saved columns": (rounded_positives.positives_kernel, RUNS | {"EPS": 2.0**-7}, set()),
    "runs": (rounded_positives.runs_kernel, RUNS, {"scale"}),
    "bias": (product_kernels.bias_kernel, {"FIRST": False, "BLOCK": 32, "WIDTH": 128}, set()),
    "times": (
        product_kernels.times_kernel,
        {"UNIT": 8, "PROGRAMS": 264, "BLOCK": 4096, "IN_PLACE": True},
        {"a", "b", "scale", "a_out", "b_out", "scale_out"},
    ),
}
ALL = tuple(TILED)
LAST = ALL[-1:]  # needs the most registers


def main() -> None:
    for capability, dtype, every in cards():
        row = row_for(capability, dtype)
        work = [(name, row.gradient) for name in (ALL if every else LAST)]
        if row.gradient_wide is not None:
            work += [(name, row.gradient_wide) for name in (ALL if every else LAST)]
        for name, sizes in work:
            kernel, kind, score, terms, present = TILED[name]
            if cannot_compile(capability) and score & SKIP:
                continue
            switches = {"D": 512, "SCORE": score, "POSITIVE": kind, "TERMS": terms, "MODE": terms, "EXACT": FULL}
            switches["REPAIR"] = name.startswith("repaired")
            made = compiled_tiles(kernel, switches, present, dtype, capability, sizes)
            show(capability, name, made, sizes.programs, dtype=dtype)
        for name, (kernel, constants, present) in SMALL.items() if every else ():
            types = {"out": "*fp32", "order": "*i64"} if name in ("bias", "runs", "positives") else {}
            if name == "times":
                types = {"a": "*fp32", "b": "*fp32", "a_out": "*bf16", "b_out": "*bf16"}
            made = compiled(kernel, constants, present, dtype, capability, types=types)
            show(capability, name, made, dtype=dtype)


if __name__ == "__main__":
    main()
