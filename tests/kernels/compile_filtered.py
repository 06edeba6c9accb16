"""Compile the kernels of skipping for cards that are not here: `python -m tests.kernels.compile_filtered`.

Prints a line of JSON for each kernel and card: its shared memory. Run in a process of its own, without
TRITON_INTERPRET.
"""

import json

import triton
from tests.kernels.resources import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.triton_impl.filtered import kernels as skipping
from tilewise.kernels.triton_impl.filtered.backward import pair_sizes_of
from tilewise.kernels.triton_impl.filtered.forward import product_sizes_of
from tilewise.kernels.triton_impl.launch.call import FULL
from tilewise.kernels.triton_impl.two_pass import forward_kernels as forward
from tilewise.kernels.triton_impl.two_pass.forward import MERGE_BLOCK, MERGE_PARTS

INTEGERS = {
    *("n", "m", "first", "first_tile", "b_units", "a_units", "out_units", "tiles", "first_row", "all_rows"),
    *("room", "first_block", "blocks", "first_g", "first_u", "col_start", "row_parts", "col_parts"),
}
NUMBERS = {"softcap", "tolerance", "usable"}
POINTERS = dict.fromkeys(("order", "place", "rows", "starts", "firsts", "table", "dense"), "*i32")
POINTERS |= dict.fromkeys(("row_key", "pairs"), "*i64")
FEATURES = {"a", "b", "out", "mean", "mass", "g", "product"}
MERGE = {"STRIP": 1, "ROW_FIRST": True, "COL_FIRST": True, "LOG": True, "MANY_PARTS": MERGE_PARTS, "BLOCK": MERGE_BLOCK}
CARDS = {
    "hopper": (90, "bf16", 2304, 256),
    "hopper, fewer columns": (90, "bf16", 2304, 128),
    "hopper, few columns": (90, "fp16", 96, 16),
    "hopper, float32": (90, "fp32", 1024, 256),
    "ampere": (80, "bf16", 2304, 256),
    "ada": (89, "bf16", 2304, 256),
    "ada, float32": (89, "fp32", 1024, 256),
    "blackwell": (100, "bf16", 2304, 256),
}


def compiled(kernel, constants, absent, dtype, blocks, capability, warps, stages, types=None):
    """The compiled kernel; `types` of arguments that are of another type than their name tells here."""
    signature, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or name in absent:
            signature[name], values[(place,)] = "constexpr", constants.get(name)
        elif name in blocks:
            signature[name] = f"tensordesc<{dtype}[{blocks[name][0]}, {blocks[name][1]}]>"
        elif name in (types or {}):
            signature[name] = types[name]
        elif name in INTEGERS:
            signature[name] = "i32"
        elif name in NUMBERS:
            signature[name] = "fp32"
        else:
            signature[name] = POINTERS.get(name) or (f"*{dtype}" if name in FEATURES else "*fp32")
    # As at run time: every tensor starts at a 16-byte address.
    aligned = {(p,): [["tt.divisibility", 16]] for p, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    for card, (capability, dtype, d, width) in CARDS.items():
        item = 4 if dtype == "fp32" else 2
        product, pairs = product_sizes_of(capability // 10, item, width), pair_sizes_of(capability // 10, item)
        desc = {"a_desc": (product.rows, product.depth), "b_desc": (product.cols, product.depth)}
        shared = {"D": d, "UNIT": 16 // item, "W": width, "EXACT": FULL}
        tile = {"R": product.rows, "C": product.cols, "K": product.depth, "GROUP": product.group, "PROGRAMS": 132}
        block = {"R": pairs.rows, "K": pairs.depth}
        column = {"R": pairs.rows, "K": min(pairs.columns, max(16, triton.next_power_of_2(d)))}
        for score in (0, 3) if card == "hopper" else (0,):
            no = set() if score else {"bias", "row_shift", "bias_share", "bias_factor", "bias_out"}
            no |= {"col_part", "col_shift", "col_out"}  # of a merge of rows
            merge = {"R": product.rows, "C": product.cols} | MERGE
            for kernel, sizes, warps, stages in (
                (skipping.gather_kernel, {"R": min(32, width), "K": min(256, triton.next_power_of_2(d))}, 4, 2),
                (skipping.parts_kernel, tile, product.warps, product.stages),
                (skipping.probe_kernel, {"S": 128, "R": 32}, 4, 2),
                (skipping.places_kernel, {"BLOCK": 1024}, 4, 2),
                (skipping.choose_kernel, {"HALVINGS": 12, "R": 1, "T": 1024, "dense": None}, 4, 2),  # of a sample
                (skipping.choose_kernel, {"HALVINGS": 12, "R": 32, "T": 64}, 4, 2),
                (forward.merge_kernel, merge, 2, 2),
                (skipping.drop_kernel, {"BLOCK": 1024}, 4, 2),
                (skipping.list_kernel, {"R": 64, "BLOCK": 1024}, 4, 2),
                (skipping.pair_kernel, block, pairs.warps, pairs.stages),
                (skipping.column_kernel, column, pairs.column_warps, pairs.stages),
                (skipping.add_rows_kernel, {"K": 1024}, 4, 2),
            ):
                constants = shared | sizes | {"SCORE": score}
                constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
                made = compiled(kernel, constants, no, dtype, desc, capability, warps, stages)
                programs = product.programs if kernel is skipping.parts_kernel else 1
                line = {"card": card, "capability": capability, "kernel": kernel.__name__, "score": score}
                line |= {"shared": made.metadata.shared, "programs": programs, "stack": stack_bytes(made.asm["cubin"])}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
