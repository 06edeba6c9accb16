"""OpenCLIP's own training loops with its losses and with ours: the logged losses and the trained weights agree.

A tiny model is trained for six steps, in float32 and in float64, by `open_clip_train.train.train_one_epoch` (tasks)
and by `open_clip_train.legacy_train.train_one_epoch`, with OpenCLIP's arguments, optimizer and schedule. Then once more
with its four loss classes replaced. Each logged loss agrees within 1e-5 of itself in float32 and 1e-12 in float64, each
weight tensor within 1e-3 and 1e-9 of its change. Biases of attention keys are left out: their gradient is 0 in exact
arithmetic, and Adam makes steps of full size from its rounding. The loss falls, so zero gradients would be noticed. Two
ranks run over gloo with DDP.

torchvision is replaced by a stand-in (`no_torchvision`), because it is not needed and must match the installed torch.
`tools/peers.py --peer open_clip_trainer` runs this file in a folder with OpenCLIP's ``src``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tools.peer_tests import no_torchvision
from torch import Tensor, nn

from tilewise.integrations import open_clip as ours

no_torchvision.install()
sys.path.insert(0, str(Path.cwd() / "src"))
torch.set_num_threads(1)

import open_clip  # noqa: E402
from open_clip_train import legacy_train, train  # noqa: E402
from open_clip_train.optim import OptimizerCfg, create_optimizer  # noqa: E402
from open_clip_train.params import parse_args  # noqa: E402
from open_clip_train.scheduler import cosine_lr  # noqa: E402

LOSSES = ("ClipLoss", "SigLipLoss", "CoCaLoss", "DistillClipLoss")
TOLERANCES = {torch.float32: (1e-5, 1e-3), torch.float64: (1e-12, 1e-9)}  # of losses, of weights
STEPS, BATCH, TOKENS, VOCABULARY = 6, 12, 8, 64
VISION = {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": TOKENS, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 1}
MULTIMODAL = {"context_length": TOKENS, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 1, "dim_head": 16}
CLASS, POOLED = {"embed_cls": True, "output_tokens": True}, {"output_tokens": True}  # for CoCa
ACCUMULATED = ["--accum-freq", "2"]
# Name -> arguments of OpenCLIP's command.
ONE_PROCESS = {
    "clip": [],
    "siglip": ["--siglip"],
    "coca": ["--model", "coca"],
    "distill": ["--distill-model", "teacher", "--distill-pretrained", "teacher"],
    "clip, accumulated": ACCUMULATED,
    "siglip, accumulated": ["--siglip", *ACCUMULATED],
    "coca, accumulated": ["--model", "coca", *ACCUMULATED],
    "clip, clipped gradients": ["--grad-clip-norm", "0.5"],
}
GATHERED = ["--gather-with-grad"]  # without it, OpenCLIP drops a part of the gradient
LOCAL = ["--local-loss", "--gather-with-grad"]
TWO_RANKS = {
    "clip, local loss": LOCAL,
    "clip, global loss": GATHERED,
    "clip, local loss, accumulated": [*LOCAL, *ACCUMULATED],
    **{f"siglip, {way}": ["--siglip", "--loss-dist-impl", way] for way in ours.EXCHANGES},
    "coca, local loss": ["--model", "coca", *LOCAL],
    "distill, local loss": [*ONE_PROCESS["distill"], *LOCAL],
}


class Data:
    """Random images and texts, as OpenCLIP's data loader gives them. Each step has the same ``batches``."""

    def __init__(self, rank: int, batches: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(10 + rank)
        self.batches = STEPS * [
            {
                "image": torch.randn(BATCH, 3, 16, 16, generator=generator).to(dtype),
                "text": torch.randint(1, VOCABULARY, (BATCH, TOKENS), generator=generator),
            }
            for _ in range(batches)
        ]
        self.dataloader, self.num_batches = self, len(self.batches)
        self.num_samples = BATCH * len(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """The data is the same in each epoch."""


class Writer:
    """Keeps the losses that the loop logs."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, float]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """As that of tensorboard."""
        if "loss" in name:
            self.losses.append((name, value))


def made(args: SimpleNamespace, seed: int = 0) -> nn.Module:
    """A tiny model of OpenCLIP."""
    torch.manual_seed(seed)
    if args.model == "coca":
        model = open_clip.CoCa(16, multimodal_cfg=MULTIMODAL, text_cfg=TEXT | CLASS, vision_cfg=VISION | POOLED)
        nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # which OpenCLIP leaves uninitialized
    else:
        bias = {"init_logit_scale": 2.3, "init_logit_bias": -5.0} if args.siglip else {}
        model = open_clip.CLIP(16, vision_cfg=VISION, text_cfg=TEXT, output_dict=True, **bias)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights, without the biases of attention keys."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in weights.items():
        if name.endswith("in_proj_bias"):  # queries, keys, values
            weights[name] = torch.cat(value.chunk(3)[::2])
    return weights


class Run(NamedTuple):
    """The class of the loss, the losses that were logged, and the weights."""

    loss: type
    logged: list[tuple[str, float]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train_once(command: list[str], legacy: bool, dtype: torch.dtype, rank: int = 0, world: int = 1) -> Run:
    """Train a new model."""
    args = parse_args(["--precision", "fp32", "--lr", "3e-3", "--warmup", "1", "--device", "cpu", *command])
    args.rank, args.local_rank, args.world_size, args.distributed = rank, rank, world, world > 1
    args.distill, args.wandb, args.log_every_n_steps, args.log_metric_every_n_steps = bool(args.distill_model), 0, 1, 1
    args.batch_size, writer = BATCH, Writer()
    model = made(args).to(dtype)
    before = weights_of(model)
    teacher = made(args, seed=1).to(dtype).eval() if args.distill else None
    data = {"train": Data(rank, args.accum_freq, dtype)}
    task = None if legacy else open_clip.create_task(args, model=model, dist_model=teacher)
    if world > 1 and task is not None:
        task.prepare_distributed()
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 and legacy else model
    settings = {"weight_decay": args.wd, "beta1": args.beta1, "beta2": args.beta2, "eps": args.eps}
    optimizer = create_optimizer(wrapped, OptimizerCfg(opt=args.opt, lr=args.lr, **settings))
    schedule = cosine_lr(optimizer, args.lr, args.warmup, STEPS)
    if task is not None:
        loss = task.loss
        train.train_one_epoch(
            train.TrainState(task=task, optimizer=optimizer, scheduler=schedule), data, args, tb_writer=writer
        )
    else:
        loss = open_clip.create_loss(args)
        legacy_train.train_one_epoch(wrapped, data, loss, 0, optimizer, None, schedule, teacher, args, tb_writer=writer)
    return Run(type(loss), writer.losses, before, weights_of(model))


def trained(command: list[str], legacy: bool, dtype: torch.dtype, replaced: bool, **ranks: int) -> Run:
    """As `train_once`, with OpenCLIP's losses replaced or not."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LOSSES if replaced else ():
            patch.setattr(open_clip.loss, name, getattr(ours, name))  # for tasks
            patch.setattr(open_clip.factory, name, getattr(ours, name))  # for `create_loss`
        return train_once(command, legacy, dtype, **ranks)


def agree(command: list[str], legacy: bool, **ranks: int) -> None:
    """Train with both in both precisions, and compare."""
    both = (False, True)
    runs = {dtype: [trained(command, legacy, dtype, replaced, **ranks) for replaced in both] for dtype in TOLERANCES}
    for dtype, (want, got) in runs.items():  # after all training, so that ranks do not wait for one that raises
        loss_tolerance, weight_tolerance = TOLERANCES[dtype]
        assert want.loss.__module__ == "open_clip.loss"
        assert got.loss is getattr(ours, want.loss.__name__)
        for name, before in want.before.items():
            moved = (want.after[name] - before).norm().item()
            assert moved > 0, name
            error = (got.after[name] - want.after[name]).norm().item()
            assert error <= weight_tolerance * moved, f"weights {name}: {error / moved:.1e} of its change, {dtype}"
        assert [name for name, _ in got.logged] == [name for name, _ in want.logged]
        for (name, value), (_, wanted) in zip(got.logged, want.logged, strict=True):
            assert abs(value - wanted) <= loss_tolerance * abs(wanted), f"logged {name}: {value}, want {wanted}"
        if ranks.get("rank", 0) == 0:  # the only one that logs
            totals = [value for name, value in want.logged if name == "train/loss"]
            assert len(totals) == STEPS
            assert totals[-1] < 0.95 * totals[0], totals


LIMIT = timedelta(seconds=60)
LOOPS = pytest.mark.parametrize("legacy", [False, True], ids=["tasks", "legacy"])


@LOOPS
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name, legacy):
    agree(ONE_PROCESS[name], legacy)


def on_rank(rank: int, place: str) -> None:
    """One of two processes. All cases share them, because the start takes longer than the training."""
    dist.init_process_group("gloo", init_method=f"file://{place}/ranks", rank=rank, world_size=2, timeout=LIMIT)
    errors = {}
    for name, command in TWO_RANKS.items():
        for legacy in (False, True):
            try:
                agree(command, legacy, rank=rank, world=2)
            except Exception as error:
                errors[f"{name} {legacy}"] = f"rank {rank}: {type(error).__name__}: {error}"
    Path(place, f"{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def errors_of_ranks(tmp_path_factory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(on_rank, args=(str(place),), nprocs=2, start_method="spawn")
    return json.loads((place / "1.json").read_text()) | json.loads((place / "0.json").read_text())


@LOOPS
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name, legacy, errors_of_ranks):
    error = errors_of_ranks.get(f"{name} {legacy}")
    assert error is None, error
