"""The configuration of a run: six small sections, checked when they are made, saved beside the run."""
# ruff: noqa: RUF009  (`setting` makes a dataclass field)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilewise.errors import ConfigError
from tilewise.train.settings import apply_overrides, build, check_section, differences, read_toml, setting, to_dict

SourceName = Literal["icons", "folder", "table", "shards"]
ModelName = Literal["icon", "clip-vit-b-32", "clip-vit-b-16", "clip-vit-l-14", "clip-tiny", "vit-bert", "vit-bert-tiny"]
LossName = Literal["tilewise", "dense", "local"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs come from and how an image is prepared."""

    source: SourceName = setting(
        "icons", "icons (ship with tilewise), folder, table (CSV/TSV/JSONL/Parquet/COCO json) or shards"
    )
    path: str = setting("", "a file, a folder, or shards as 'data/{00000..00041}.tar'; empty: the icons that ship")
    eval_path: str = setting("", "held-out pairs, same source; empty: the icons' test family, or no evaluation")
    eval_share: float = setting(
        0.0, "share of a folder or table that is held out of training, where there is no eval_path", least=0, most=0.5
    )
    image_root: str = setting("", "folder that relative image paths of a table start from; empty: the table's own")
    image_column: str = setting("image", "column of a table that holds image paths (or image bytes, Parquet)")
    text_column: str = setting("caption", "column of a table that holds captions")
    id_column: str = setting(
        "", "column of a table, or entry of a shard's .json, whose equal values mean the same thing (loss.mask_same_id)"
    )
    records: int = setting(0, "pairs in the shards; 0 counts them from the tar headers before the start", least=0)
    shuffle_shards: int = setting(16, "shards whose records are shuffled together", least=1)
    augment: Literal["auto", "none", "crop", "icon"] = setting(
        "auto",
        "none (resize, centre crop), crop (RandomResizedCrop), icon (shift, turn, scale, stroke); auto by source",
    )
    crop_scale: tuple[float, float] = setting((0.08, 1.0), "area of a random crop, as a share", above=0, most=1)
    crop_ratio: tuple[float, float] = setting((0.75, 4 / 3), "width / height of a random crop", above=0)
    eval_memory_mib: int = setting(
        1024, "memory for decoded held-out images; those beyond it are decoded for every evaluation", least=0
    )
    workers: int = setting(2, "threads that read and decode images", least=1, most=256)
    prefetch: int = setting(1, "batches that are prepared ahead", least=0, most=16)

    def __post_init__(self) -> None:
        check_section(self)
        if self.source != "icons" and not self.path:
            raise ConfigError(f"path is needed for source {self.source!r}; only the icons ship with tilewise")
        if self.eval_share and (self.eval_path or self.source not in ("folder", "table")):
            other = "eval_path" if self.eval_path else f"source={self.source!r}"
            raise ConfigError(
                f"eval_share holds pairs of a folder or table out, got {self.eval_share} with {other}; set one of "
                "eval_share and eval_path, and for shards name some of them in eval_path"
            )
        if self.id_column and self.source not in ("table", "shards"):
            raise ConfigError(
                f"id_column is for source 'table' (a column) and 'shards' (an entry of .json), got {self.source!r}"
            )
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigError(f"{name} is [low, high] with low <= high, got [{low}, {high}]")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which two towers."""

    name: ModelName = setting("icon", "icon (the demo's), clip-*, or vit-bert (two separate towers)")
    weights: str = setting("", "safetensors weights of a clip-* model: a local folder or a hub id")
    image_weights: str = setting("", "safetensors weights of vit-bert's image tower: a local folder or a hub id")
    text_weights: str = setting("", "safetensors weights of vit-bert's text tower: a local folder or a hub id")
    tokenizer: str = setting("", "tokenizer folder or hub id; empty: the weights' own, else hashed words")
    lock_image: bool = setting(
        False, "LiT: the pretrained image tower keeps its weights and runs once, without a graph or new projection"
    )
    embed_dim: int = setting(0, "width of the shared features; 0: the model's own", least=0, most=65536)
    image_size: int = setting(0, "pixels along a side; 0: the model's own", least=0, most=4096)
    width: int = setting(1024, "width of the demo model's image tower", least=8, most=65536)
    depth: int = setting(2, "residual blocks of the demo model's image tower", least=0, most=1000)
    text_buckets: int = setting(
        65536, "rows of the demo model's table of hashed words and word parts", least=64, most=2**30
    )
    dropout: float = setting(0.0, "dropout of the demo model's towers", least=0, most=0.9)

    def __post_init__(self) -> None:
        check_section(self)
        if self.weights and not self.name.startswith("clip"):
            raise ConfigError(
                f"weights is for clip-* models, got name={self.name!r}; see image_weights and text_weights"
            )
        if (self.image_weights or self.text_weights) and not self.name.startswith("vit-bert"):
            raise ConfigError(f"image_weights and text_weights are for vit-bert models, got name={self.name!r}")
        if self.lock_image and not (self.weights or self.image_weights):
            missing = {"c": "weights", "v": "image_weights"}.get(self.name[0])
            advice = f"Set {missing}, or" if missing else "Choose a clip-* or vit-bert model with weights, or"
            raise ConfigError(
                "lock_image=true keeps the image tower's weights as they are, but this tower starts from random "
                f"numbers and would never learn. {advice} set lock_image=false"
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimized, and through which implementation."""

    name: LossName = setting("tilewise", "tilewise, or the baselines dense (CLIP) and local (OpenCLIP's local loss)")
    kind: Literal["clip", "siglip"] = setting("clip", "softmax over both directions, or pairwise sigmoid")
    mask_same_id: bool = setting(
        False, "pairs with the same id (icons: the same name; data.id_column) are no negatives"
    )
    initial_scale: float = setting(
        1 / 0.07, "logit scale at the start; the weights of a clip-* model bring their own", above=0
    )
    max_scale: float = setting(100.0, "the logit scale is clamped to [1, max_scale]", least=1)
    initial_bias: float = setting(-10.0, "logit bias of the sigmoid loss at the start")
    workspace_mib: int = setting(256, "the most scratch memory of the tilewise loss", least=1)
    offload: bool = setting(False, "the batch stays in host memory; one chunk at a time is on the device")

    def __post_init__(self) -> None:
        check_section(self)
        if self.kind == "siglip" and self.mask_same_id:
            raise ConfigError("mask_same_id needs kind='clip'; the sigmoid loss has no mask")
        if self.initial_scale > self.max_scale:
            raise ConfigError(f"initial_scale {self.initial_scale} is above max_scale {self.max_scale}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How parameters move."""

    name: Literal["adamw", "adafactor"] = setting("adamw", "adamw, or the modified Adafactor of the papers")
    lr: float = setting(1e-3, "peak learning rate", above=0)
    weight_decay: float = setting(1e-4, "decoupled weight decay (matrices only)", least=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", least=0, most=0.99999)
    eps: float = setting(1e-8, "added to the root of the second moment (AdamW)", above=0)
    warmup_steps: int = setting(0, "steps of linear warm-up", least=0)
    final_lr_share: float = setting(0.0, "learning rate at the end, as a share of the peak", least=0, most=1)
    extend: Literal["refuse", "restart", "stretch", "constant"] = setting(
        "refuse",
        "learning rate where a run that exists gets another length: restart (warm-up and cosine again over the added "
        "steps), stretch (the curve of the new length from now on), constant (the final one)",
    )
    clip_norm: float = setting(1.0, "gradients are scaled down to this norm; 0 leaves them", least=0)
    ema_decay: float = setting(0.0, "decay of the averaged weights used for evaluation; 0: none", least=0, most=0.99999)
    scale_lr: float = setting(1.0, "learning rate of the logit scale, as a share of lr", least=0)

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long, how large, how precise."""

    batch_size: int = setting(4096, "pairs per step, over all ranks", least=2)
    chunk_size: int = setting(1024, "pairs that an encoder sees at once", least=1)
    epochs: float = setting(8.0, "passes over the data (a fraction is fine)", above=0, most=1e9)
    steps: int = setting(0, "steps in all; 0 takes epochs", least=0)
    precision: Literal["float32", "bf16", "fp16"] = setting("float32", "autocast of the encoders")
    seed: int = setting(0, "of the weights, the order and the augmentation", least=0, most=2**63 - 1)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA where there is one")
    threads: int = setting(0, "torch threads on the CPU; 0 leaves torch's own number", least=0)

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is kept and shown. None of it changes what is learned."""

    folder: str = setting("runs/run", "where the run lives; starting again with the same folder continues it")
    log_every: int = setting(1, "steps between lines in metrics.jsonl", least=1)
    evaluate_every: int = setting(0, "steps between evaluations; 0: at the end only", least=0)
    checkpoint_every: int = setting(100, "steps between checkpoints; one is always kept at the end", least=1)
    keep_last: int = setting(2, "checkpoints kept beside the best one", least=1)
    tensorboard: bool = setting(True, "write TensorBoard events as well")
    report: bool = setting(True, "write report.html at the end")

    def __post_init__(self) -> None:
        check_section(self)
        if not self.folder.strip():
            raise ConfigError(
                f"folder must name a folder for the run, got {self.folder!r}. Give one, such as runs/run; a single "
                "dot is the current folder"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run.

    >>> RunConfig(loss=LossConfig(name="dense")).loop.batch_size
    4096
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        if self.loop.chunk_size > self.loop.batch_size:
            raise ConfigError(
                f"loop.chunk_size {self.loop.chunk_size} is above loop.batch_size {self.loop.batch_size}; "
                "a chunk is a part of the batch"
            )
        if self.loss.mask_same_id and self.data.source != "icons" and not self.data.id_column:
            table = "write the pairs as a table and " if self.data.source == "folder" else ""
            raise ConfigError(
                f"loss.mask_same_id=true would have no effect: pairs of data.source={self.data.source!r} have no ids. "
                f"To say which show the same thing, {table}set data.id_column, or set loss.mask_same_id=false"
            )
        if self.data.augment == "icon" and self.data.source != "icons":
            raise ConfigError("data.augment='icon' is for data.source='icons'; use 'crop' or 'none'")
        if (self.model.name == "icon") != (self.data.source == "icons") and self.model.name == "icon":
            raise ConfigError(
                "model.name='icon' reads 32-pixel grey icons (data.source='icons'); choose a clip-* or vit-bert model"
            )


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file (or the defaults), with ``section.key=value`` laid over it."""
    values: dict[str, Any] = read_toml(path) if path is not None else {}
    return build(RunConfig, apply_overrides(values, overrides))


# What may change when a run continues: where and how often things are written, who decodes, and where the same data
# lies. Another length is the business of `tilewise.train.plan`.
FREE_TO_CHANGE = (
    "output.", "data.workers", "data.prefetch", "data.path", "data.eval_path", "data.eval_memory_mib",
    "data.image_root", "loop.device", "loop.threads", "loop.steps", "loop.epochs", "optim.extend", "loss.workspace_mib",
)  # fmt: skip


def check_same_run(saved: dict[str, Any], config: RunConfig) -> None:
    """Refuse to continue a run whose settings would make it another run; settings it did not know have defaults."""
    try:
        before = to_dict(build(RunConfig, saved))
    except ConfigError as error:
        raise ConfigError(
            f"the run in {config.output.folder} was started by another version, with settings that this one refuses: "
            f"{error}. Choose another output.folder"
        ) from error
    changed = [
        f"{name} was {old!r}, now {new!r}"
        for name, (old, new) in differences(before, to_dict(config)).items()
        if not name.startswith(FREE_TO_CHANGE)
    ]
    if changed:
        raise ConfigError(
            f"the run in {config.output.folder} was started with other settings ({', '.join(changed)}). "
            "Give the old ones, or choose another output.folder"
        )
