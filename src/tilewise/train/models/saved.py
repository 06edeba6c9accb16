"""Models in a folder: a description from which the towers can be built, and for an export also the weights.

``tilewise.json`` describes the model. The folder also has the configurations and the tokenizer in the format of
`transformers`: those of a CLIP model in the folder itself, those of a ViT and a BERT in ``image`` and ``text``. A run
keeps such a folder without weights, which are in its checkpoints. An export adds the weights as safetensors. Nothing is
unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.errors import CheckpointError, TilewiseError
from tilewise.train.models import pretrained
from tilewise.train.models.build import build_icon_model
from tilewise.train.models.plain_clip import PlainCLIP, read_config
from tilewise.train.models.pretrained import Body, Towers
from tilewise.train.models.towers import CLIP_PIXELS, ImageTower, Pixels, Scale, TextTower, TwoTowers
from tilewise.train.untrusted import STATE_LIMIT, parse_json, read_regular
from tilewise.train.writing import make_folder, one_sentence, sync

FORMAT = 1
ABOUT = "tilewise.json"
TEXT = {"clip": "", "vit-bert": "text"}  # the sub-folder of the text tower and its tokenizer


def describe_model(model: TwoTowers, folder: Path) -> None:
    """Write the description of a model, without its weights. The folder gets its name only when it is complete."""
    _write_whole(folder, lambda aside: _write_description(model, aside), shutil.rmtree)


def export_model(model: TwoTowers, folder: Path) -> None:
    """Write a model with its weights. A new folder gets its name only when all files are written.

    In an empty folder, tilewise.json is written last. A folder with files raises an error and is not changed.
    """

    def write(aside: Path) -> None:
        _write_description(model, aside)
        _write_weights(model, aside)
        if model.kind != "icon":
            _write_json(aside / "preprocessor_config.json", _preprocessing(model.pixels))

    _write_whole(folder, write)


def _write_whole(folder: Path, write: Callable[[Path], None], clear: Callable[[Path], None] | None = None) -> None:
    """Write a temporary folder next to the final one, and rename it.

    Args:
        folder: the final folder.
        write: writes the files into a folder.
        clear: removes an existing final folder. None: an existing folder must be empty, and the files are moved into
            it, since it may be the current folder of a shell.
    """
    folder = Path(os.path.realpath(folder))  # "." has no name from which a temporary name can be made
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    with one_sentence(f"the model to {folder}"):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            make_folder(aside)
            write(aside)
            for path in aside.rglob("*"):
                sync(path)
            if clear is None and folder.is_dir():
                _move_into(folder, aside)
                return
            if clear is not None and folder.is_dir():
                clear(folder)
            aside.rename(folder)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _move_into(folder: Path, aside: Path) -> None:
    """Move the files of a folder into an empty one. `ABOUT` is last, so an incomplete model is not taken for one."""
    if any(folder.iterdir()):
        raise FileExistsError("the folder is not empty")
    for path in sorted(aside.iterdir(), key=lambda path: path.name == ABOUT):
        shutil.move(path, folder / path.name)
    aside.rmdir()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_description(model: TwoTowers, folder: Path) -> None:
    scale = model.scale
    about: dict[str, Any] = {
        "format": FORMAT,
        "kind": model.kind,
        "pixels": dataclasses.asdict(model.pixels),
        "logit_scale": float(scale().detach()),
        "logit_bias": None if scale.bias is None else float(scale.bias.detach()),
        "max_scale": scale.max_scale,
    }
    if model.kind == "icon":
        about["sizes"] = model.configs
    else:
        for name, config in model.configs.items():
            config.save_pretrained(folder / name)
        pretrained.save_tokenizer(model.tokenizer, folder / TEXT[model.kind])
        about["length"] = model.tokenizer([""])["input_ids"].shape[1]
        about["embed_dim"] = model.text.body.project.out_features
        about["project_image"] = model.image.body.project is not None
    _write_json(folder / ABOUT, about)


def _preprocessing(pixels: Pixels) -> dict[str, Any]:
    """Return the settings of an image processor of `transformers` that takes the centre square."""
    return {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3,
        "size": {"shortest_edge": pixels.size}, "do_center_crop": True,
        "crop_size": {"height": pixels.size, "width": pixels.size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(pixels.mean), "image_std": list(pixels.std),
    }  # fmt: skip


def _write_weights(model: TwoTowers, folder: Path) -> None:
    from safetensors.torch import save_file

    image, text = model.image.body, model.text.body
    if model.kind == "icon":
        save_file(_plain(dict(model.state_dict())), folder / "model.safetensors")
    elif model.kind == "clip":
        parts = {"vision_model": image.model, "visual_projection": image.project}
        parts |= {"text_model": text.model, "text_projection": text.project}
        weights = {f"{part}.{name}": value for part in parts for name, value in parts[part].state_dict().items()}
        weights["logit_scale"] = model.scale.log_scale
        save_file(_plain(weights), folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _write_json(folder / "config.json", {**config, "architectures": ["CLIPModel"], "dtype": "float32"})
    else:
        with pretrained.quiet_transformers():
            image.model.save_pretrained(folder / "image")
            text.model.save_pretrained(folder / "text")
        heads = {"image": image.project, "text": text.project}
        weights = {name: head.weight for name, head in heads.items() if head is not None}
        save_file(_plain(weights), folder / "projections.safetensors")


def _plain(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def read_about(folder: Path) -> dict[str, Any]:
    """Return the description of the model in a folder."""
    try:
        about = parse_json(read_regular(folder / ABOUT, STATE_LIMIT).decode("utf-8"))
        form = about["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has no model of tilewise, or its {ABOUT} is damaged: {error}") from error
    if form != FORMAT:
        raise CheckpointError(f"{folder / ABOUT} has format {form}, and this version reads {FORMAT}")
    return about


def build_described(folder: Path, *, for_training: bool = True) -> TwoTowers:
    """Build the model that `describe_model` described, with random weights.

    Args:
        folder: the folder of the description.
        for_training: if False, CLIP is built without `transformers`, which gives the same features up to rounding, and
            no random weights are drawn: all of them have to be loaded.
    """
    if for_training:
        return _build(folder, with_weights=False)
    with _NoRandomWeights():
        return _build(folder, with_weights=False, plain=True)


class _NoRandomWeights(TorchFunctionMode):
    """Modules built in this context have zeros instead of random weights.

    Not uninitialized memory: `trunc_normal_` draws again as long as a number lies outside of its limits.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):  # of Tensor or torch.nn.init
            tensor = args[0] if args else kwargs["tensor"]
            tensor.detach().zero_()
            return tensor
        return func(*args, **kwargs)


def load_exported(folder: Path) -> TwoTowers:
    """Load the model that `export_model` wrote."""
    return _build(folder, with_weights=True)


def _build(folder: Path, with_weights: bool, plain: bool = False) -> TwoTowers:
    folder = folder.absolute()  # a missing sub-folder must not be taken for a hub id
    about = read_about(folder)
    try:
        scale = Scale(about["logit_scale"], about["logit_bias"], about["max_scale"])
        if about["kind"] == "icon":
            model = build_icon_model(about["sizes"], scale)
            if with_weights:
                model.load_state_dict(_tensors(folder / "model.safetensors"))
            return model
        towers = _plain_towers(folder, about) if plain else None
        towers = towers or _transformers_towers(folder, about, with_weights)
        tokenizer = pretrained.load_tokenizer(str(folder / TEXT[about["kind"]]), about["length"])
        return TwoTowers(towers.image, towers.text, scale, towers.pixels, tokenizer, about["kind"], towers.configs)
    except TilewiseError:
        raise
    except Exception as error:  # damaged settings make torch and transformers raise many types
        raise CheckpointError(f"the model in {folder} cannot be built: {type(error).__name__} {error}") from error


def _plain_towers(folder: Path, about: dict[str, Any]) -> Towers | None:
    """The towers of a CLIP that needs no `transformers`; None for other models."""
    config = read_config(folder) if about["kind"] == "clip" else None
    if config is None:
        return None
    model = PlainCLIP(config)
    pixels = Pixels(model.image_size, 3, *CLIP_PIXELS)
    image = ImageTower(Body(model.vision_model, _itself, model.visual_projection), pixels)
    return Towers(image, TextTower(Body(model.text_model, _itself, model.text_projection)), pixels, None, {"": config})


def _itself(vector: Tensor) -> Tensor:
    return vector


def _transformers_towers(folder: Path, about: dict[str, Any], with_weights: bool) -> Towers:
    hf = pretrained.transformers()

    def make(cls: Any, config: Any, name: str, **extra: Any) -> Any:
        if with_weights:
            return pretrained.load_weights_as(cls, str(folder / name), **extra)
        return cls(config.from_pretrained(folder / name), **extra).float()

    if about["kind"] == "clip":
        towers = pretrained.split_clip(make(hf.CLIPModel, hf.CLIPConfig, ""))
    else:
        vision = make(hf.ViTModel, hf.ViTConfig, "image", add_pooling_layer=False)
        text = make(hf.BertModel, hf.BertConfig, "text", add_pooling_layer=False)
        towers = pretrained.join_vit_bert(vision, text, about["embed_dim"], about["project_image"])
        if with_weights:
            heads = {"image": towers.image.body.project, "text": towers.text.body.project}
            weights = _tensors(folder / "projections.safetensors")
            for name, head in heads.items():
                if head is not None:
                    head.load_state_dict({"weight": weights[name]})
    return towers


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
