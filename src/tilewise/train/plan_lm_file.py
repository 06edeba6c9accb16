"""The sizes of a language model from a ``config.json`` of `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tilewise.errors import ConfigError
from tilewise.train.plan_lm import ModelShape


def read_shape(path: Path, given: dict[str, int]) -> ModelShape:
    """Return the sizes of the model that a ``config.json`` describes.

    The parameters are those of the model that `transformers` builds from the file, without memory for its weights. No
    code of the folder is run.

    Args:
        path: the file, or its folder.
        given: sizes that replace those of the file.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):  # False for a name that is too long, too
        raise ConfigError(f"there is no file {file}. Give a config.json of transformers, or its folder")
    from tilewise.train.models.pretrained import quiet_transformers, transformers

    hf = transformers()
    advice = "Give --vocab, --hidden, --layers and --parameters instead"
    try:
        with quiet_transformers():
            config = hf.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
        text = config.get_text_config()
        sizes = {"vocabulary": text.vocab_size, "hidden": text.hidden_size, "layers": text.num_hidden_layers}
    except Exception as error:  # a damaged file makes transformers raise many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot read the sizes of a language model from {file}: {reason}. {advice}") from error
    sizes |= given
    if "parameters" not in sizes:
        sizes["parameters"] = count_parameters(hf, config, file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return ModelShape(name=f"{name}, changed" if given else name, **sizes)


def count_parameters(hf: Any, config: Any, file: Path) -> int:
    """Return the number of parameters of a model. Weights that are tied count once."""
    import torch

    from tilewise.train.models.pretrained import quiet_transformers

    try:
        with torch.device("meta"), quiet_transformers():
            model = hf.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return sum(weight.numel() for weight in model.parameters())
    except Exception as error:  # an architecture that transformers does not know, or no language model
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot count the parameters of {file}: {reason}. Give them with --parameters") from error
