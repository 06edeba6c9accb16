"""Compile the Triton kernels for cards that are not here: `python -m tests.kernels.compile_kernels`.

Triton needs no card to compile, only its own tools. Prints a line of JSON for each kernel and card: its shared memory.
Run in a process of its own, without TRITON_INTERPRET.
"""

import json

import triton
from tests.kernels.resources import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.triton_impl.launch.call import FULL
from tilewise.kernels.triton_impl.one_pass import small_batch as small_step
from tilewise.kernels.triton_impl.sizes import SAFE, TABLE, WIDE_TABLE
from tilewise.kernels.triton_impl.two_pass import backward_kernels as backward
from tilewise.kernels.triton_impl.two_pass import forward_kernels as forward
from tilewise.kernels.triton_impl.two_pass import positive_kernels as positive
from tilewise.kernels.triton_impl.two_pass import saved as carried
from tilewise.kernels.triton_impl.two_pass import token_kernels as tokens
from tilewise.kernels.triton_impl.two_pass.forward import MERGE_BLOCK, MERGE_PARTS

POINTERS = {"row_key": "*i64", "col_key": "*i32", "row_skip": "*i32", "col_skip": "*i32", "needs_repair": "*i32"}
POINTERS |= {"place_part": "*i32", "row_top_col": "*i64", "dense": "*i32"}
NUMBERS = {"softcap": "fp32", "share": "fp32"} | dict.fromkeys(
    ("a_size", "b_size", "peak_count", "n", "m", "first", "ahead", "a_stride", "b_stride", "g_stride", "parts"), "i32"
)
OPTIONAL = {
    *("bias", "row_key", "col_key", "row_skip", "col_skip", "row_shift", "col_shift", "col_weight", "pos_part"),
    *("pos_col_part", "sum_part", "peaks", "bias_part", "grad_pos_col", "grad_sum", "span", "grad_col", "col_lse"),
    *("grad_pos", "num_positives", "row_entropy", "grad_entropy", "e_desc", "dense", "row_factor"),
}
DIAGONAL, ONE, MANY = 1, 2, 3
MERGE = {"BEGIN": False, "END": True, "MANY_PARTS": MERGE_PARTS, "BLOCK": MERGE_BLOCK}

# loss -> (STATS, TERMS, SCORE, POSITIVE, WIDE, which optional arguments are there)
LOSSES = {
    "clip": (3, 3, 0, DIAGONAL, False, {"peaks", "span", "col_lse", "grad_col", "grad_pos"}),
    "clip, wide": (3, 3, 0, DIAGONAL, True, {"peaks", "span", "col_lse", "grad_col", "grad_pos"}),
    "siglip": (4, 36, 16, DIAGONAL, True, {"bias", "bias_part"}),
    "cross entropy": (
        9,
        9,
        3,
        ONE,
        True,
        {"bias", "row_key", "col_weight", "sum_part", "grad_sum", "grad_pos", "peaks"},
    ),
    "cross entropy, bias": (1, 129, 3, ONE, True, {"bias", "bias_part", "row_key", "grad_pos", "peaks"}),
    "cross entropy, carried": (1, 1, 0, ONE, True, {"row_key", "grad_pos", "peaks", "e_desc", "span", "row_factor"}),
    "cross entropy, if not skipped": (1, 1, 0, ONE, True, {"row_key", "grad_pos", "peaks", "e_desc", "span", "dense"}),
    "tokens": (3, 193, 3, ONE, True, {"bias", "bias_part", "row_key", "grad_pos", "row_entropy", "grad_entropy"}),
    "nt_xent": (19, 19, 8, ONE, False, {"row_key", "peaks", "span", "col_lse", "grad_col", "grad_pos", "grad_pos_col"}),
    "supcon": (
        *(19, 19, 8, MANY, False),
        OPTIONAL
        - {"bias", "row_skip", "col_skip", "sum_part", "peaks", "bias_part", "grad_sum", "col_weight"}
        - {"e_desc", "dense"},
    ),
    "info_nce with ids": (
        3,
        3,
        4,
        DIAGONAL,
        False,
        {"row_skip", "col_skip", "span", "col_lse", "grad_col", "grad_pos"},
    ),
}
CARDS = {
    "hopper": (90, TABLE[9, 2], "bf16", tuple(loss for loss in LOSSES if "e_desc" not in LOSSES[loss][5])),
    "hopper, wide rows": (
        90,
        WIDE_TABLE[9, 2],
        "bf16",
        (
            *("cross entropy", "cross entropy, bias", "cross entropy, carried", "cross entropy, if not skipped"),
            *("tokens", "supcon", "info_nce with ids"),
        ),
    ),
    "hopper, float32": (90, TABLE[9, 4], "fp32", ("clip",)),
    "ampere": (80, TABLE[8, 2], "bf16", ("clip", "supcon")),
    "ampere, float32": (80, TABLE[8, 4], "fp32", ("clip",)),
    "ada": (89, SAFE[2], "bf16", ("clip",)),
    "ada, float32": (89, SAFE[4], "fp32", ("clip",)),
    "blackwell": (100, TABLE[10, 2], "bf16", ("clip",)),
    "blackwell, float32": (100, TABLE[10, 4], "fp32", ("clip",)),
}


def compiled(kernel, constants, present, dtype, sizes, capability):
    """The compiled kernel; arguments that are neither constants nor ``present`` are None."""
    blocks = {}
    if sizes is not None:
        blocks = {
            "a_desc": (sizes.rows, sizes.depth),
            "b_desc": (sizes.cols, sizes.depth),
            "g_desc": (sizes.rows, sizes.cols // sizes.pieces),
            "e_desc": (sizes.rows, sizes.cols // sizes.pieces),
        }
    signature, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or (name in OPTIONAL and name not in present):
            signature[name], values[(place,)] = "constexpr", constants.get(name)
        elif name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name][0]}, {blocks[name][1]}]>"
        elif name in ("a", "b", "g", "scaled"):
            signature[name] = f"*{dtype}"
        elif name == "row_key" and constants["POSITIVE"] == MANY:
            signature[name] = "*i32"
        else:
            signature[name] = NUMBERS.get(name) or POINTERS.get(name, "*fp32")
    # As at run time: every tensor starts at a 16-byte address.
    aligned = {(p,): [["tt.divisibility", 16]] for p, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    warps, stages = (sizes.warps, sizes.stages) if sizes is not None else (4, 2)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )


def main() -> None:
    for card, (capability, (forward_sizes, gradient_sizes), dtype, losses) in CARDS.items():
        for loss in losses:
            stats, terms, score, kind, wide, present = LOSSES[loss]
            shared = {"D": 512, "SCORE": score, "POSITIVE": kind, "EXACT": FULL, "WIDE": wide, "PROGRAMS": 264}
            shared["CARRY"] = "e_desc" in present
            shared["STRIP"] = forward_sizes.strip if "peaks" in present and stats & 2 else 1
            for kernel, sizes, bits in (
                (tokens.token_kernel if loss == "tokens" else forward.forward_kernel, forward_sizes, {"STATS": stats}),
                (forward.repair_kernel, forward_sizes, {"STATS": stats}),
                (backward.gradient_kernel, gradient_sizes, {"TERMS": terms}),
                (positive.positive_kernel, None, {}),
                (positive.positive_gradient_kernel, None, {"TERMS": terms}),
                (tokens.merge_tokens_kernel, None, {"STATS": stats} | MERGE),
                (carried.factor_kernel, None, {"BLOCK": carried.FACTOR_ROWS, "WIDTH": carried.WIDTH}),
                (carried.settle_kernel, None, {"BLOCK": carried.SETTLED_ROWS}),
            ):
                if kernel is tokens.merge_tokens_kernel and loss != "tokens":
                    continue
                if kernel in (carried.factor_kernel, carried.settle_kernel) and loss != "cross entropy, carried":
                    continue
                small = sizes is None and loss != "cross entropy, carried"
                if (small and (kind == MANY or card != "hopper")) or (
                    kernel is forward.repair_kernel and loss != "clip"
                ):
                    continue
                if sizes is None:
                    blocks = {"P": 64, "K": 64}
                else:
                    blocks = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group}
                there = present | ({"num_positives"} if kernel is positive.positive_kernel else set())
                result = compiled(kernel, shared | blocks | bits, there, dtype, sizes, capability)
                programs = 1 if sizes is None else sizes.programs
                line = {"card": card, "capability": capability, "loss": loss, "kernel": kernel.__name__}
                line |= {"shared": result.metadata.shared, "programs": programs}
                print(json.dumps(line | {"stack": stack_bytes(result.asm["cubin"])}), flush=True)
    for card, (capability, _, _, _) in CARDS.items():
        for kernel, block in (
            (small_step.loss_kernel, small_step.SUM_BLOCK),
            (small_step.times_kernel, small_step.TIMES_BLOCK),
        ):
            result = compiled(kernel, {"BLOCK": block, "UNIT": 8}, {"col_lse"}, "fp32", None, capability)
            line = {"card": card, "capability": capability, "kernel": kernel.__name__, "programs": 1}
            line |= {"shared": result.metadata.shared, "stack": stack_bytes(result.asm["cubin"])}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
