"""Compile kernels for cards that are not present. Triton needs no card to compile.

A script prints a line of JSON for each kernel and card. It runs in a process of its own, without TRITON_INTERPRET:
`python -m tests.kernels.compile_ranks quick`, or `full` for all kernels and cards.
"""

import json
import sys
from collections.abc import Iterator

import torch
import triton
from benchmarks.compilers import IN_REGISTERS
from tests.kernels.resources import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.known_faults import FAULTS
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.launch import code_of, declared
from tilewise.kernels.triton_impl.sizes import TABLE, TF32, architecture
from tilewise.kernels.triton_impl.two_pass.guide import stored_block

FLOATS = {"softcap", "tolerance", "usable", "share", "most_entropy", "guide_softcap", "hot", "beta", "rest", "limit"}
# Pointers that are not float32, by name
POINTERS = dict.fromkeys(
    ("col_key", "row_skip", "col_skip", "needs_repair", "repaired", "only_if", "skip_if", "column", "case")
    + (
        "order",
        "top_col_part",
        "pick_place",
        "place",
        "rows",
        "starts",
        "firsts",
        "table",
        "row_place",
        "row_count",
        "col_place",
        "col_count",
        "hide",
        "count",
    ),
    "*i32",
)
POINTERS |= dict.fromkeys(
    ("row_key", "pick", "picked", "row_top_col", "pairs", "row_ids", "col_ids", "row_best", "col_best", "keys"), "*i64"
)
STORED = ("x_desc", "y_desc")  # float32, whatever the features are
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
FEATURES = {"a", "b", "e", "g", "out", "scaled", "values", "grad", "mean", "mass", "dropped", "product", "features"}


CAPABILITIES = 80, 86, 89, 90, 100, 120
# Every capability, and both sizes of a type on each row of the size table
QUICK = (80, "bf16"), (89, "bf16"), (90, "bf16"), (100, "bf16"), (80, "fp32"), (86, "fp32"), (90, "fp32"), (120, "fp32")
QUICK += ((90, TF32),)  # float32 in TF32, where it has sizes of its own


def cards() -> Iterator[tuple[int, str, bool]]:
    """(capability, type, whether all kernels are compiled for it) of this run.

    The code of float16 and bfloat16 differs only in the instruction of the product, and float32 has smaller tiles. So
    the largest kernels are compiled in all three types, and the rest in bfloat16. Capability 8.6 has the sizes of 8.9.
    """
    full = {"quick": False, "full": True}[sys.argv[1]]
    for dtype in ("bf16", "fp16", "fp32", TF32):
        for capability in CAPABILITIES if dtype != TF32 else (90,):
            if full or (capability, dtype) in QUICK:
                yield capability, dtype, full and dtype == "bf16" and capability != 86


def cannot_compile(capability: int) -> bool:
    """Whether this version of Triton fails to compile some kernels for the card. "auto" takes none of them there."""
    faults = [fault for fault in FAULTS if fault.affects(triton.__version__) and not fault.compiles]
    return any(divmod(capability, 10) in fault.capabilities for fault in faults)


def row_for(capability: int, dtype: str):
    """The row of the size table."""
    return TABLE[architecture(divmod(capability, 10)), {"fp32": 4, TF32: TF32}.get(dtype, 2)]


def compiled(kernel, constants, present, dtype, capability, *, blocks=None, warps=4, stages=2, types=None):
    """The compiled kernel.

    Args:
        constants: values of compile-time constants; those that the kernel lacks are left out.
        present: optional arguments that are not None.
        blocks: sizes of the blocks of tensor descriptors, by name.
        types: types that differ from the tables above, by name.
    """
    places, optional, dynamic = declared(kernel)
    blocks, types = blocks or {}, types or {}
    if dtype == TF32:
        dtype, constants = "fp32", constants | {"EXACT": TF32}
    constants = constants | {"CODE": code_of(tuple(constants.values()))}
    signature, values = {}, {}
    for name, place in places.items():
        if name.isupper() or (name in optional and name not in present):
            signature[name], values[(place,)] = "constexpr", constants[name] if name.isupper() else None
        elif name in blocks:
            kind = "fp32" if name in STORED else dtype
            signature[name] = f"tensordesc<{kind}[{blocks[name][0]}, {blocks[name][1]}]>"
        elif place in dynamic:
            signature[name] = "fp32" if name in FLOATS else "i32"
        else:
            default = f"*{dtype}" if name in FEATURES else "*fp32"
            signature[name] = types.get(name) or POINTERS.get(name, default)
    # As at run time, every tensor starts at a 16-byte address.
    aligned = {(places[name],): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_step(step, given, capability):
    """The compiled kernel of a step of a program, from the arguments that it has in a run.

    Args:
        given: the types of what the program is given, such as "*bf16" or "fp32", by name. What is missing is None.
    """
    signature, values, attributes = {}, {}, {}
    for place, (name, value) in enumerate(step.arguments.items()):
        if isinstance(value, Buffer):
            kind, value = given.get(value.name) if value.dtype is None else NAMES[value.dtype], None
        else:
            # As at run time, 1 and None are part of the compiled kernel, and so is whether 16 divides a number.
            fixed = step.kernel.params[place].is_constexpr or value is None or value == 1
            kind = None if fixed else {int: "i32", float: "fp32"}[type(value)]
        signature[name] = kind or "constexpr"
        if kind is None:
            values[(place,)] = value
        elif kind[0] == "*" or (kind == "i32" and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=step.kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": step.warps})


def compiled_tiles(kernel, constants, present, dtype, capability, sizes, **more):
    """The same for a kernel over tiles of these sizes."""
    piece = sizes.rows, sizes.cols // sizes.pieces
    blocks = {
        "a_desc": (sizes.rows, sizes.depth),
        "b_desc": (sizes.cols, sizes.depth),
        "ga_desc": (sizes.rows, sizes.depth),
        "gb_desc": (sizes.cols, sizes.depth),
        "g_desc": piece,
        "e_desc": piece,
    }
    blocks |= dict.fromkeys(STORED, tuple(stored_block(sizes)))
    tile = {"R": sizes.rows, "C": sizes.cols, "K": sizes.depth, "GROUP": sizes.group, "PROGRAMS": 264}
    how = {"blocks": blocks, "warps": sizes.warps, "stages": sizes.stages}
    return compiled(kernel, constants | tile, present, dtype, capability, **how, **more)


def show(capability, kernel, result, programs=1, **more) -> None:
    """Print a line about a compiled kernel."""
    line = {"capability": capability, "kernel": kernel, "shared": result.metadata.shared, "programs": programs}
    line |= {"threads": 32 * result.metadata.num_warps} | resources(result.asm["cubin"])
    line["in_registers"] = len(IN_REGISTERS.findall(result.asm["ptx"]))  # products with an operand in registers
    print(json.dumps(line | more), flush=True)
