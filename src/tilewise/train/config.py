"""The configuration of a run: six small sections that are checked on creation and saved in the run folder."""
# ruff: noqa: RUF009  (`setting` makes a dataclass field)

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tilewise.errors import ConfigError
from tilewise.train.settings import apply_overrides, build, check_section, differences, read_toml, setting, to_dict

SourceName = Literal["auto", "icons", "folder", "table", "shards"]
ModelName = Literal[
    "auto", "icon", "clip", "clip-vit-b-32", "clip-vit-b-16", "clip-vit-l-14", "clip-tiny", "vit-bert", "vit-bert-tiny"
]
LossName = Literal["tilewise", "dense", "local"]
PATCHES = {  # pixels along a side of a patch
    "clip-vit-b-32": 32, "clip-vit-b-16": 16, "clip-vit-l-14": 14, "clip-tiny": 8, "vit-bert": 16, "vit-bert-tiny": 8
}  # fmt: skip


def _expand_home(section: DataConfig | OutputConfig, *names: str) -> None:
    """Replace ``~`` at the start of paths, and of each of several that ``::`` joins, by the home folder."""
    for name in names:
        parts = getattr(section, name).split("::")
        object.__setattr__(section, name, "::".join(os.path.expanduser(part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of the pairs, and the preparation of images."""

    source: SourceName = setting(
        "auto", "icons (ship with tilewise), folder, table (CSV/TSV/JSONL/Parquet/COCO json) or shards; auto: by path"
    )
    path: str = setting("", "a file, a folder, or shards as 'data/{00000..00041}.tar'; empty: the icons that ship")
    eval_path: str = setting("", "held-out pairs, same source; empty: the icons' test family, or no evaluation")
    eval_share: float = setting(
        -1.0,
        "share of a folder or table that is held out of training, if there is no eval_path; 0: none; "
        "-1: a tenth, at most 1,000 images",
        least=-1,
        most=0.5,
    )
    image_root: str = setting("", "base folder of relative image paths in a table; empty: the table's own folder")
    image_column: str = setting("image", "column of a table that holds image paths (or image bytes, Parquet)")
    text_column: str = setting("caption", "column of a table that holds captions")
    id_column: str = setting(
        "", "column of a table, or entry of a shard's .json, that is the id of a pair (loss.mask_same_id)"
    )
    records: int = setting(
        0, "number of pairs in the shards; 0 counts them from the tar headers before the start", least=0
    )
    shuffle_shards: int = setting(16, "number of shards whose records are shuffled together", least=1)
    augment: Literal["auto", "none", "crop", "icon"] = setting(
        "auto",
        "none (resize, centre crop), crop (RandomResizedCrop), icon (shift, rotate, scale, stroke); auto: by source",
    )
    crop_scale: tuple[float, float] = setting((0.08, 1.0), "area of a random crop, as a share", above=0, most=1)
    crop_ratio: tuple[float, float] = setting((0.75, 4 / 3), "width / height of a random crop", above=0)
    eval_memory_mib: int = setting(
        1024, "memory for decoded held-out images; the others are decoded for every evaluation", least=0
    )
    workers: int = setting(2, "number of threads that read and decode images", least=1, most=256)
    prefetch: int = setting(1, "number of batches that are prepared ahead", least=0, most=16)

    def __post_init__(self) -> None:
        check_section(self)
        _expand_home(self, "path", "eval_path", "image_root")
        if -1 < self.eval_share < 0:
            raise ConfigError(f"eval_share must be -1 (a tenth) or from 0 to 0.5, got {self.eval_share}")
        if self.source not in ("auto", "icons") and not self.path:
            raise ConfigError(f"path is needed for source {self.source!r}; only the icons ship with tilewise. Set it")
        if self.eval_share > 0 and (self.eval_path or self.source not in ("auto", "folder", "table")):
            other = "eval_path" if self.eval_path else f"source={self.source!r}"
            raise ConfigError(
                f"eval_share holds out pairs of a folder or table, got {self.eval_share} with {other}. Set only one of "
                "eval_share and eval_path. For shards, name some of them in eval_path"
            )
        if self.id_column and self.source not in ("auto", "table", "shards"):
            raise ConfigError(
                f"id_column needs source 'table' (a column) or 'shards' (an entry of .json), got {self.source!r}"
            )
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigError(f"{name} must be [low, high] with low <= high, got [{low}, {high}]")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The two towers."""

    name: ModelName = setting(
        "auto",
        "icon (the demo's), clip-*, vit-bert (two separate towers), or clip (any sizes, from model.weights); "
        "auto: icon for icons, clip or vit-bert with weights, else clip-tiny",
    )
    weights: str = setting("", "safetensors weights of a clip-* model: a local folder or a hub id")
    image_weights: str = setting("", "safetensors weights of vit-bert's image tower: a local folder or a hub id")
    text_weights: str = setting("", "safetensors weights of vit-bert's text tower: a local folder or a hub id")
    tokenizer: str = setting("", "tokenizer folder or hub id; empty: the weights' own, else hashed words")
    lock_image: bool = setting(
        False, "LiT: the pretrained image tower is frozen and runs once per step, without a graph or a new projection"
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
        patch = 0 if self.weights or self.image_weights else PATCHES.get(self.name, 0)
        if 0 < self.image_size < patch:
            raise ConfigError(
                f"image_size must be at least {patch}, one patch of {self.name}, got {self.image_size}. "
                "Set it to 0 for the model's own size"
            )
        if self.name == "clip" and not self.weights:
            raise ConfigError(
                "name='clip' takes the sizes of the model from model.weights, which is empty. Set it, or choose a name "
                "with sizes, such as clip-vit-b-32"
            )
        if self.weights and not self.name.startswith(("auto", "clip")):
            raise ConfigError(
                f"weights needs a clip-* model, got name={self.name!r}; see image_weights and text_weights"
            )
        if (self.image_weights or self.text_weights) and not self.name.startswith(("auto", "vit-bert")):
            raise ConfigError(f"image_weights and text_weights need a vit-bert model, got name={self.name!r}")
        if self.lock_image and not (self.weights or self.image_weights):
            missing = {"c": "weights", "v": "image_weights"}.get(self.name[0])
            advice = f"Set {missing}, or" if missing else "Choose a clip-* or vit-bert model with weights, or"
            raise ConfigError(
                "lock_image=true freezes the image tower, but this tower starts from random weights and would never "
                f"learn. {advice} set lock_image=false"
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss and its implementation."""

    name: LossName = setting("tilewise", "tilewise, or the baselines dense (CLIP) and local (OpenCLIP's local loss)")
    kind: Literal["clip", "siglip"] = setting("clip", "softmax over both directions, or pairwise sigmoid")
    mask_same_id: bool = setting(
        False, "pairs with the same id (icons: the same name; else data.id_column) are no negatives of one another"
    )
    initial_scale: float = setting(1 / 0.07, "initial logit scale; pretrained clip-* weights have their own", least=1)
    max_scale: float = setting(100.0, "the logit scale is clamped to [1, max_scale]", least=1)
    initial_bias: float = setting(-10.0, "initial logit bias of the sigmoid loss")
    workspace_mib: int = setting(256, "maximum workspace of the tilewise loss", least=1)
    offload: bool = setting(False, "the batch stays in host memory; one chunk at a time is on the device")

    def __post_init__(self) -> None:
        check_section(self)
        if self.kind == "siglip" and self.mask_same_id:
            raise ConfigError("mask_same_id needs kind='clip'; the sigmoid loss has no mask")
        if self.initial_scale > self.max_scale:
            raise ConfigError(f"initial_scale {self.initial_scale} is above max_scale {self.max_scale}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw", "adafactor"] = setting("adamw", "adamw, or the modified Adafactor of the papers")
    lr: float = setting(1e-3, "peak learning rate", above=0, most=1e6)
    weight_decay: float = setting(1e-4, "decoupled weight decay (matrices only)", least=0, most=1e6)
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", least=0, most=0.99999)
    eps: float = setting(1e-8, "added to the square root of the second moment (AdamW)", above=0)
    warmup_steps: int = setting(0, "number of steps of linear warm-up", least=0)
    final_lr_share: float = setting(0.0, "learning rate at the end, as a share of the peak", least=0, most=1)
    extend: Literal["refuse", "restart", "stretch", "constant"] = setting(
        "refuse",
        "learning rate if the length of an existing run changes: restart (warm-up and cosine again over the added "
        "steps), stretch (the curve of the new length from now on), constant (the final learning rate)",
    )
    clip_norm: float = setting(1.0, "maximum norm of the gradients; 0: no clipping", least=0)
    ema_decay: float = setting(0.0, "decay of the averaged weights used for evaluation; 0: none", least=0, most=0.99999)
    scale_lr: float = setting(1.0, "learning rate of the logit scale, as a share of lr", least=0, most=1e6)

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length, batch size and precision."""

    batch_size: int = setting(4096, "pairs per step, over all ranks; at most all training pairs", least=2)
    chunk_size: int = setting(1024, "pairs that an encoder processes at once; at most a whole batch", least=1)
    epochs: float = setting(
        0.0, "passes over the data (a fraction is fine); 0: 8, or as many as give 200 steps", least=0, most=1e9
    )
    steps: int = setting(0, "total number of steps; 0: use epochs", least=0)
    precision: Literal["float32", "bf16", "fp16"] = setting("float32", "autocast of the encoders")
    seed: int = setting(0, "seed of the weights, the order and the augmentation", least=0, most=2**63 - 1)
    shard: bool = setting(False, "FSDP2: each rank has a shard of the weights and of the optimizer state")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto uses CUDA if it is available")
    threads: int = setting(0, "number of torch threads on the CPU; 0: torch's default", least=0, most=1024)

    def __post_init__(self) -> None:
        check_section(self)
        object.__setattr__(self, "chunk_size", min(self.chunk_size, self.batch_size))


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is saved and shown. No setting here changes the result of training."""

    folder: str = setting("runs/run", "folder of the run; starting again with the same folder continues the run")
    log_every: int = setting(1, "steps between lines in metrics.jsonl", least=1)
    evaluate_every: int = setting(0, "steps between evaluations; 0: only at the end", least=0)
    checkpoint_every: int = setting(100, "steps between checkpoints; one is always written at the end", least=1)
    keep_last: int = setting(2, "number of checkpoints to keep in addition to the best one", least=1)
    tensorboard: bool = setting(True, "also write TensorBoard events")
    wandb: str = setting(
        "", "project of Weights & Biases that also gets the numbers (needs the package wandb); empty: none"
    )
    report: bool = setting(True, "write report.html at the end")

    def __post_init__(self) -> None:
        check_section(self)
        _expand_home(self, "folder")
        if not self.folder.strip():
            raise ConfigError(
                f"folder must name a folder for the run, got {self.folder!r}. Give one, such as runs/run; a single "
                "dot is the current folder"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run.

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
        if self.loss.mask_same_id and self.data.source not in ("auto", "icons") and not self.data.id_column:
            table = "write the pairs as a table and " if self.data.source == "folder" else ""
            raise ConfigError(
                f"loss.mask_same_id=true would have no effect: pairs of data.source={self.data.source!r} have no ids. "
                f"To give them ids, {table}set data.id_column, or set loss.mask_same_id=false"
            )
        refused = [
            f"{name}={value!r}" for name, value in (
                ("optim.name", self.optim.name), ("loop.precision", self.loop.precision)
            ) if value in ("adafactor", "fp16")
        ]  # fmt: skip
        if self.loop.shard and refused:
            raise ConfigError(
                f"loop.shard=true needs optim.name='adamw' and no loop.precision='fp16', got {' and '.join(refused)}. "
                "Use adamw, and bf16 or float32, or set loop.shard=false"
            )
        if self.data.augment == "icon" and self.data.source not in ("auto", "icons"):
            raise ConfigError("data.augment='icon' needs data.source='icons'; use 'crop' or 'none'")
        if self.model.name == "icon" and self.data.source not in ("auto", "icons"):
            raise ConfigError(
                "model.name='icon' reads 32-pixel grey icons (data.source='icons'); choose a clip-* or vit-bert model"
            )


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in a TOML file (or the defaults), apply overrides ``section.key=value``, and settle it."""
    values: dict[str, Any] = read_toml(path) if path is not None else {}
    return settled(build(RunConfig, apply_overrides(values, overrides)))


def settled(config: RunConfig) -> RunConfig:
    """Replace "auto" in data.source and model.name: the path determines the source, the weights determine the name.

    >>> settled(RunConfig(data=DataConfig(path="pairs.csv"))).model.name
    'clip-tiny'
    """
    data, model = config.data, config.model
    source = source_of(data.path) if data.source == "auto" else data.source
    split = source in ("folder", "table") and not data.eval_path
    share = data.eval_share if split or data.eval_share > 0 else 0.0
    name = model.name
    if name == "auto" and model.weights:
        name = "clip"
    elif name == "auto" and (model.image_weights or model.text_weights):
        name = "vit-bert"
    elif name == "auto":
        name = "icon" if source == "icons" else "clip-tiny"
    try:
        data = replace(data, source=source, eval_share=share)
    except ConfigError as error:
        raise ConfigError(f"data.{error}") from None
    try:
        model = replace(model, name=name)
    except ConfigError as error:
        raise ConfigError(f"model.{error}") from None
    return replace(config, data=data, model=model)


def source_of(path: str) -> SourceName:
    """Return the kind of data at a path, by its name. A folder that exists, or a name without an ending, is a folder.

    >>> source_of("data/{000..041}.tar"), source_of("pairs.csv"), source_of("pictures"), source_of("")
    ('shards', 'table', 'folder', 'icons')
    """
    if not path or path.endswith(".zip"):
        return "icons"
    if os.path.isdir(path):  # False for a name that is too long, too
        return "folder"
    if any(re.search(r"\.tar(?!\w)", part.rpartition("/")[2]) for part in path.split("::")):
        return "shards"
    return "table" if os.path.isfile(path) or Path(path).suffix else "folder"


# Settings that may change when a run continues: output, decoding threads, and the location of the same data. A change
# of length is handled by `tilewise.train.plan`.
FREE_TO_CHANGE = (
    "output.", "data.workers", "data.prefetch", "data.path", "data.eval_path", "data.eval_memory_mib",
    "data.image_root", "loop.device", "loop.shard", "loop.threads", "loop.steps", "loop.epochs",
    "optim.extend", "loss.workspace_mib",
)  # fmt: skip


def check_same_run(saved: dict[str, Any], config: RunConfig) -> None:
    """Raise `ConfigError` if other settings would change the result of a run that continues.

    Settings that were added after the run was started have their defaults.
    """
    try:
        before = to_dict(settled(build(RunConfig, saved)))
    except ConfigError as error:
        raise ConfigError(
            f"the run in {config.output.folder} was started by another version, with settings that this version "
            f"refuses: {error}. Choose another output.folder"
        ) from error
    changed = [
        f"{name} was {old!r}, now {new!r}"
        for name, (old, new) in differences(before, to_dict(config)).items()
        if not name.startswith(FREE_TO_CHANGE)
    ]
    if changed:
        raise ConfigError(
            f"the run in {config.output.folder} was started with other settings ({', '.join(changed)}). "
            "Use the old settings, or choose another output.folder"
        )
