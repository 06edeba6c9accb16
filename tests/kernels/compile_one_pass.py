"""Compile the kernels that form gradients in forward for other cards: python -m tests.kernels.compile_one_pass.

As `compile_kernels`: a line of JSON for each kernel and card, in a process of its own, without TRITON_INTERPRET.
"""

import json

import triton
from tests.kernels.resources import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.triton_impl.launch.call import FULL
from tilewise.kernels.triton_impl.one_pass import product_kernels as direct_products
from tilewise.kernels.triton_impl.one_pass import sigmoid_kernels as direct_sigmoid
from tilewise.kernels.triton_impl.one_pass import softmax_kernels as direct_softmax
from tilewise.kernels.triton_impl.one_pass.softmax import MANY_PARTS
from tilewise.kernels.triton_impl.sizes import SAFE, TABLE, WIDE_TABLE, Sizes

DIAGONAL, ONE = 1, 2
SOFTCAP, BIAS, ONE_BIAS, SKIP, BIAS_TOTAL = 2, 1, 16, 4, 32
INTEGERS = {"n", "m", "first", "ahead", "parts", "count"}
KEYS = {"row_key": "*i64", "col_key": "*i32", "row_skip": "*i32", "col_skip": "*i32", "needs_repair": "*i32"}
KEYS |= {"column": "*i32", "order": "*i64", "only_if": "*i32"}
FEATURES = {"a", "b", "g", "scaled", "out", "values", "grad"}
NONE = dict.fromkeys(
    ("row_key", "col_key", "row_skip", "col_skip", "bias", "bias_part", "row_shift", "square", "only_if")
)
PERSISTENT = {"PROGRAMS": 264, "EXACT": FULL}
TILED = {
    "exponents of cross entropy": (direct_softmax.exponent_kernel, ONE, 0, 0, ("row_key", "only_if")),
    "exponents, bias and softcap": (direct_softmax.exponent_kernel, ONE, BIAS + SOFTCAP, 0, ("row_key", "bias")),
    "exponents of info_nce with ids": (direct_softmax.exponent_kernel, DIAGONAL, SKIP, 0, ("row_skip", "col_skip")),
    "exponents in needs_repair": (direct_softmax.exponent_kernel, ONE, 0, 1, ("row_key",)),
    "maxima in needs_repair": (direct_softmax.exponent_kernel, ONE, 0, 3, ("row_key",)),
    "softplus in needs_repair": (direct_sigmoid.softplus_kernel, DIAGONAL, ONE_BIAS, 0, ("bias",)),
    "sigmoid": (direct_sigmoid.sigmoid_kernel, DIAGONAL, ONE_BIAS, BIAS_TOTAL, ("bias", "bias_part")),
}
SMALL = {
    "start": (direct_softmax.start_kernel, {"BLOCK": 1024}, ("square", "row_shift")),
    "shift": (direct_softmax.shift_kernel, {"MANY_PARTS": MANY_PARTS, "BLOCK": 32}, ()),
    "rows": (
        direct_softmax.rows_kernel,
        {"D": 4096, "SCORE": SOFTCAP, "POSITIVE": ONE, "MANY_PARTS": MANY_PARTS, "WIDTH": 128, "BLOCK": 32},
        ("square", "row_key"),
    ),
    "finish": (direct_products.finish_rows_kernel, {"D": 4096, "BLOCK": 8, "WIDTH": 256}, ()),
    "positives": (
        direct_products.positives_kernel,
        {"D": 4096, "STRIDE": 4096, "EPS": 2.0**-7, "RUN": 64, "BLOCK": 4, "WIDTH": 512},
        (),
    ),
    "runs": (direct_products.runs_kernel, {"D": 4096, "STRIDE": 4096, "RUN": 64, "BLOCK": 4, "WIDTH": 512}, ()),
    "bias": (direct_products.bias_kernel, {"FIRST": False, "BLOCK": 32, "WIDTH": 128}, ()),
    "multiply": (direct_products.multiply_kernel, {"UNIT": 8, "PROGRAMS": 264, "BLOCK": 4096}, ()),
}
ALL = tuple(TILED)
CARDS = {
    "hopper": (90, TABLE[9, 2][1], "bf16", ALL),
    "hopper, wide rows": (90, WIDE_TABLE[9, 2][1], "bf16", ALL[:2] + ALL[-1:]),
    "hopper, float32": (90, TABLE[9, 4][1], "fp32", (ALL[0], ALL[-1])),
    "ampere": (80, TABLE[8, 2][1], "bf16", (ALL[0], ALL[-1])),
    "ada": (89, SAFE[2][1], "bf16", (ALL[0], ALL[-1])),
    "blackwell": (100, TABLE[10, 2][1], "bf16", (ALL[0], ALL[-1])),
}


def compiled(kernel, constants, dtype, sizes: Sizes | None, capability):
    """The compiled kernel; ``constants`` may be None, for an argument that is not there."""
    blocks = {}
    if sizes is not None:
        blocks = {"a_desc": (sizes.rows, sizes.depth), "b_desc": (sizes.cols, sizes.depth)}
        blocks["g_desc"] = (sizes.rows, sizes.cols // sizes.pieces)
    signature, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name][0]}, {blocks[name][1]}]>"
        elif name == "softcap":
            signature[name] = "fp32"
        elif name in INTEGERS or name.endswith("_stride"):
            signature[name] = "i32"
        else:
            signature[name] = KEYS.get(name) or ("*" + (dtype if name in FEATURES else "fp32"))
    # As at run time: every tensor starts at a 16-byte address.
    aligned = {(p,): [["tt.divisibility", 16]] for p, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    warps, stages = (sizes.warps, sizes.stages) if sizes is not None else (4, 2)
    how = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)


def without(names):
    """Nothing, for the arguments that may be missing, but for these."""
    return {name: value for name, value in NONE.items() if name not in names}


def show(card, capability, kernel, result, programs) -> None:
    line = {"card": card, "capability": capability, "kernel": kernel, "shared": result.metadata.shared}
    print(json.dumps(line | {"programs": programs, "stack": stack_bytes(result.asm["cubin"])}), flush=True)


def main() -> None:
    for card, (capability, sizes, dtype, names) in CARDS.items():
        for name in names:
            kernel, kind, score, terms, present = TILED[name]
            blocks = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group}
            switches = {"D": 512, "SCORE": score, "POSITIVE": kind, "TERMS": terms} | PERSISTENT | blocks
            result = compiled(kernel, switches | without(present), dtype, sizes, capability)
            show(card, capability, name, result, sizes.programs)
    for name, (kernel, constants, present) in SMALL.items():
        show("hopper", 90, name, compiled(kernel, constants | without(present), "bf16", None, 90), 1)


if __name__ == "__main__":
    main()
