"""Compile the kernels of small batches for many cards: `python -m tests.kernels.compile_small`. See `compiling`."""

from dataclasses import dataclass, replace

import torch
from tests.kernels.compiling import cards, compiled_step, show

from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import Needs, PairShape, PairSpec, wanted_names
from tilewise.kernels.triton_impl.program import Launch
from tilewise.kernels.triton_impl.small.programs import gradient_program, loss_program, saved_type
from tilewise.kernels.triton_impl.small.stats import GRADIENTS, stats_gradient_program, stats_program

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALL_NEEDS = Needs(a=True, b=True, scale=True)
POINTERS = dict.fromkeys(("row_key", "col_key", "row_skip", "col_skip"), "*i64")
MORE = ("factor", "grad_output", "size", *(f"g_{name}" for name in GRADIENTS))
POINTERS |= dict.fromkeys(("scale", "bias", "each", "square", *MORE), "*fp32")


@dataclass(frozen=True)
class Case:
    """A kind of call; ``present``: what it is given besides the features, by name."""

    spec: PairSpec
    present: tuple[str, ...] = ("scale",)
    needs: Needs = ALL_NEEDS
    one_bias: bool = False
    kept: bool = False
    size: tuple[int, int] = (4096, 4096)

    def key(self, dtype: torch.dtype) -> SmallKey:
        given = {"has_row_key": "row_key" in self.present, "has_skips": "row_skip" in self.present}
        shape = PairShape(*self.size, 512, dtype, torch.device("cuda"), **given)
        return SmallKey(shape, self.spec, self.needs, "torch", frozenset(self.present), self.one_bias, self.kept)


SOFTMAX = PairSpec(row_lse=True, positive="one")
HEAD = replace(SOFTMAX, ignored=-100, drop_rows=True)
MANY = replace(SOFTMAX, positive="many", mask_self=True, symmetric=True)
SIGMOID = PairSpec(softplus=True, positive="one")
TOKENS = replace(HEAD, row_entropy=True, row_top=True)
IDS = ("row_skip", "col_skip")
EVERYTHING = Case(
    replace(HEAD, softcap=30.0),
    ("scale", "row_key", "bias", "each", "square"),
    ALL_NEEDS._replace(bias=True),
    kept=True,
    size=(1000, 4001),
)
CLIP = Case(replace(SOFTMAX, col_lse=True))
CASES = {
    "clip": CLIP,
    "cross entropy with everything": EVERYTHING,
    "clip, ragged": replace(CLIP, size=(1003, 1003)),
    "clip, few": replace(CLIP, size=(60, 60)),
    "clip with ids": Case(replace(SOFTMAX, col_lse=True), ("scale", *IDS)),
    "info_nce": Case(SOFTMAX, ("number",), Needs()),
    "info_nce with ids": Case(SOFTMAX, ("scale", *IDS)),
    "info_nce, narrow": Case(SOFTMAX, size=(2**17, 64)),
    "nt_xent": Case(replace(SOFTMAX, mask_self=True, symmetric=True, in_range=True), ("scale", "row_key")),
    "supcon": Case(MANY, ("scale", "row_key", "col_key")),
    "many positives": Case(replace(SOFTMAX, positive="many"), ("scale", "row_key", "col_key")),
    "siglip": Case(SIGMOID, ("scale", "bias"), ALL_NEEDS._replace(bias=True), one_bias=True),
    "cross entropy": Case(HEAD, ("number", "row_key"), Needs(), kept=True),
    "cross entropy, few": Case(HEAD, ("number", "row_key"), Needs(), kept=True, size=(1024, 32768)),
    "tokens": Case(TOKENS, ("scale", "row_key", "bias"), ALL_NEEDS._replace(bias=True), size=(1000, 4001)),
    "tokens in range": Case(replace(TOKENS, drop_rows=False, in_range=True), ("number", "row_key"), Needs()),
    "sigmoid of each row": Case(SIGMOID, ("scale", "bias"), ALL_NEEDS._replace(bias=True), one_bias=True),
    "log-sum-exp with ids": Case(PairSpec(row_lse=True, mask_self=True), ("scale", *IDS)),
    "no gradient": Case(HEAD, ("number", "row_key"), Needs(a=False, b=False), kept=True),
}
STATISTICS = ("tokens", "tokens in range", "sigmoid of each row", "log-sum-exp with ids")
LARGEST = {"clip": "both_kernel", "cross entropy with everything": "rows_kernel"}


def programs(name: str, case: Case, dtype: torch.dtype):
    """The programs of forward and backward."""
    key = case.key(dtype)
    if name in STATISTICS:
        yield stats_program(key._replace(scalar=False), own_shift=True)
        coming = [each for each in wanted_names(case.spec) if each in GRADIENTS]
        yield stats_gradient_program(key._replace(scalar=False), tuple(coming), case.needs)
        return
    yield loss_program(key)
    sizes = (case.size[0], 512), (case.size[1], 512)
    for overwrite in (True, False) if any(case.needs[:3]) else ():
        yield gradient_program(sizes, dtype, case.needs, overwrite=overwrite)


def main() -> None:
    for capability, name, every in cards():
        if name not in TYPES:  # TF32: small batches are multiplied by the library
            continue
        dtype, seen = TYPES[name], set()
        for case, wanted in CASES.items():
            given = {part: POINTERS.get(part, "fp32") for part in (*wanted.present, *MORE, "share")}
            given |= dict.fromkeys("ab", {torch.float32: "*fp32"}.get(saved_type(dtype, wanted.needs), f"*{name}"))
            for program in programs(case, wanted, dtype):
                for step in program.steps:
                    kernel = step.kernel.fn.__name__ if isinstance(step, Launch) else None
                    if kernel is None or not (every or LARGEST.get(case) == kernel):
                        continue
                    made = compiled_step(step, given, capability)
                    if made.hash not in seen:
                        seen.add(made.hash)
                        show(capability, kernel, made, dtype=name, case=case)


if __name__ == "__main__":
    main()
