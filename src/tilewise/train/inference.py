"""Use the model of a run: encode images and captions in Python, or export it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError, DataError, RangeError, ShapeError
from tilewise.train.data.images import centre_box, decode, on_white, to_tensor
from tilewise.train.distributed import choose_device
from tilewise.train.evaluate import Encoders
from tilewise.train.models import TwoTowers, export_model, load_exported
from tilewise.train.models.saved import ABOUT
from tilewise.train.untrusted import IMAGE_LIMIT, read_regular
from tilewise.train.writing import check_new_folder

if TYPE_CHECKING:
    from rich.console import Console


class ImageTextModel:
    """Both towers of a run, for encoding.

    Args:
        encoders: the model on its device. It encodes without gradients.
        origin: a description of where the model came from.

    Attributes:
        image_tower, text_tower: ``nn.Module`` in evaluation mode: uint8 images (n, channels, size, size) and tokens to
            unit features (n, d).
        tokenizer: turns a list of captions into named tensors, the keywords of `text_tower`.
        pixels: the input of the image tower: its size, channels, mean and standard deviation.
        logit_scale, logit_bias: scores are ``logit_scale * image @ text.T + logit_bias``. The bias is 0 except for the
            sigmoid loss.
        device: device of the features.
        origin: a description of where the model came from.
    """

    def __init__(self, encoders: Encoders, origin: str) -> None:
        self._encoders, self.origin = encoders, origin
        self._model: TwoTowers = encoders.model
        self.image_tower, self.text_tower = self._model.image, self._model.text
        self.tokenizer, self.pixels, self.device = self._model.tokenizer, self._model.pixels, encoders.device
        self.logit_scale = float(self._model.scale().detach())
        bias = self._model.scale.bias
        self.logit_bias = 0.0 if bias is None else float(bias.detach())

    def preprocess(self, image: Any) -> Tensor:
        """Return the resized centre square of a picture, the input of the image tower: uint8 (channels, size, size).

        Args:
            image: a path, the bytes of an image file, or a Pillow image. Transparent pixels become white.
        """
        return self._preprocess(image, "the given image")

    def _preprocess(self, image: Any, name: str) -> Tensor:
        from PIL.Image import Image

        name = str(image) if isinstance(image, str | Path) else name
        if isinstance(image, str | Path):
            try:
                image = read_regular(image, IMAGE_LIMIT)
            except OSError as error:
                raise DataError(f"cannot read the image {image}: {error.strerror or error}") from error
        if not isinstance(image, bytes | Image):
            raise DataError(f"{name} must be a path, bytes or a Pillow image, got {type(image).__name__}")
        try:
            picture = decode(image) if isinstance(image, bytes) else on_white(image)
        except (DataError, OSError, SyntaxError, ValueError) as error:  # Pillow reads an opened file only here
            raise DataError(f"{name}: {error}. Is it a complete image file in a format that Pillow reads?") from error
        made = to_tensor(picture, centre_box(*picture.size), self.pixels.size)
        if self.pixels.channels == 1:
            made = made.float().mean(0, keepdim=True).round().to(torch.uint8)
        return made

    def encode_image(self, images: Tensor | Iterable[Any]) -> Tensor:
        """Return unit features (n, d), float32, on the model's device.

        Args:
            images: uint8 (n, channels, size, size), or pictures that `preprocess` accepts. Pictures are read in chunks.
        """
        size = self._encoders.chunk_size
        if isinstance(images, Tensor):
            wanted = (self.pixels.channels, self.pixels.size, self.pixels.size)
            if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != wanted:
                raise ShapeError(
                    f"images must be uint8 of shape (n, {', '.join(map(str, wanted))}), got {images.dtype} of shape "
                    f"{tuple(images.shape)}. Give paths or Pillow images, or use preprocess; values are 0 to 255"
                )
            return self._encoders.images(images.split(size)).clone() if len(images) else self._nothing()
        if isinstance(images, str | Path | bytes) or not isinstance(images, Iterable):
            raise ShapeError("encode_image takes several images; give a list, such as [image]")
        pictures = (self._preprocess(image, f"image {i}") for i, image in enumerate(images))
        chunks = iter(lambda: list(islice(pictures, size)), [])
        first = next(chunks, None)
        if first is None:
            return self._nothing()
        return self._encoders.images(map(torch.stack, chain([first], chunks))).clone()

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Return unit features (n, d), float32, on the model's device."""
        if isinstance(texts, str):
            raise ShapeError("encode_text takes several captions; give a list, such as [caption]")
        captions = list(texts)
        wrong = next((i for i, caption in enumerate(captions) if not isinstance(caption, str)), None)
        if wrong is not None:
            raise DataError(f"a caption must be text, got {type(captions[wrong]).__name__} at index {wrong}. Use str()")
        return self._encoders.texts(captions).clone() if captions else self._nothing()

    def _nothing(self) -> Tensor:
        """Return features (0, d). The text tower runs once to find d and the dtype. The clone works with autograd."""
        return self._encoders.texts([""])[:0].clone()

    def export(self, folder: str | Path) -> Path:
        """Write the model as safetensors and JSON. `load_model` reads it; `transformers` reads the towers it knows."""
        target = Path(folder)
        check_new_folder(target)
        export_model(self._model, target)
        return target

    def readers(self, folder: Path) -> list[str]:
        """Return lines of Python with which `transformers` reads the exported folder; none if it cannot."""
        if self._model.kind == "clip":
            lines = [f"transformers.CLIPModel.from_pretrained({str(folder)!r})"]
        elif self._model.kind == "vit-bert":
            names = {"image": "ViTModel", "text": "BertModel"}
            lines = [
                f"transformers.{name}.from_pretrained({str(folder / part)!r}, add_pooling_layer=False)"
                for part, name in names.items()
            ]
        else:
            lines = []
        return lines


def load_model(
    folder: str | Path, *, device: str = "auto", checkpoint: str | int = "auto", chunk_size: int = 256
) -> ImageTextModel:
    """Load the model of a run, or an exported model, for inference.

    The folder is enough: nothing is downloaded, and the weights that the run started from are not needed.

    Args:
        folder: the folder of a run (`output.folder`), or one that `ImageTextModel.export` or ``tilewise export`` wrote.
        device: "auto" (CUDA if it is available), "cpu" or "cuda".
        checkpoint: for a run: "best" (by held-out recall), "last", or a step that was kept. If that one is missing or
            damaged, an error is raised. "auto" takes the best one, or the last one if nothing was evaluated. If the
            best one is missing or damaged, it warns and takes the last whole one. Averaged weights are used if the run
            has them.
        chunk_size: images or captions that a tower processes at once.
    """
    return open_model(folder, device, checkpoint, chunk_size)


def open_model(
    folder: str | Path, device: str = "auto", checkpoint: str | int = "auto", chunk_size: int = 256,
    console: Console | None = None,
) -> ImageTextModel:  # fmt: skip
    """`load_model`, with a console that shows which checkpoint is used, and why."""
    if chunk_size < 1:
        raise RangeError(f"chunk_size must be at least 1, got {chunk_size}. It only limits memory; the default is 256")
    path = Path(folder)
    if (path / ABOUT).is_file():
        if checkpoint != "auto":
            raise CheckpointError(
                f"{path} is an exported model, which has no checkpoints, got checkpoint {checkpoint!r}. Leave it out, "
                "or give the folder of the run"
            )
        place = choose_device(device)
        return ImageTextModel(
            Encoders(load_exported(path).to(place), place, chunk_size=chunk_size), f"{path}, an exported model,"
        )
    from tilewise.train.load_run import load_run

    _, encoders, choice = load_run(path, device, checkpoint, console)
    if choice.problems and console is None:
        warnings.warn(". ".join([*choice.problems, choice.sentence()]), stacklevel=3)
    encoders = Encoders(encoders.model, encoders.device, chunk_size=chunk_size)
    return ImageTextModel(encoders, f"{path}, step {choice.step}")
