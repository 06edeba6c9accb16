"""Memory of a language model's logits, and the largest batch with and without them: ``tilewise plan lm``.

The numbers are computed as in table A3 of "Cut Your Losses in Large-Vocabulary Language Models", for fully sharded data
parallelism over `gpus` devices (nothing is stored twice), checkpointed activations and 16-bit AdamW::

    logits       = 4 * tokens * vocabulary                    float32, once
    activations  = 2 * tokens * hidden * layers               one 16-bit hidden state for each layer
    model        = 8 * parameters                             weights, gradients and two moments, 16 bits each
    room         = gpus * (memory of one - reserve) - model
    largest batch before = room / (4 * vocabulary + 2 * hidden * layers)
    largest batch after  = (room - gpus * workspace) / (2 * hidden * layers)

These are lower bounds. A dense loss also keeps the log-probabilities and their gradient, and a checkpointed layer needs
its own activations while it is recomputed. The paper has no workspace. The statistics that tilewise keeps for each
token, about 40 bytes, are not counted.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from tilewise.errors import ConfigError, RangeError

LOGIT_BYTES = 4
ACTIVATION_BYTES = 2
GIB, MIB = 2**30, 2**20


def _check_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RangeError(
            f"{name} is a whole number, at least {least}, got {value!r:.60}. Write it in digits, without a unit"
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that determine its memory.

    Args:
        name: the name in the table.
        vocabulary: classes of the head.
        hidden: features of a hidden state.
        layers: blocks, each of which keeps one hidden state.
        parameters: of the whole model.
    """

    name: str
    vocabulary: int
    hidden: int
    layers: int
    parameters: int

    def __post_init__(self) -> None:
        for field in ("vocabulary", "hidden", "layers", "parameters"):
            _check_count(field, getattr(self, field))


def _shape(name: str, vocabulary: int, hidden: int, layers: int, parameters: int) -> ModelShape:
    return ModelShape(name=name, vocabulary=vocabulary, hidden=hidden, layers=layers, parameters=parameters)


# The rows of table A3. The parameter counts are those of the published files (GPT 2 and GPT Neo with their buffers).
# The vocabulary is that of the tokenizer (the head may be padded).
PAPER_MODELS = (
    _shape("GPT 2", 50_257, 768, 12, 137_022_720),
    _shape("GPT Neo 1.3B", 50_257, 2048, 24, 1_365_907_456),
    _shape("GPT Neo 2.7B", 50_257, 2560, 32, 2_718_416_384),
    _shape("Gemma 2B", 256_000, 2048, 18, 2_506_172_416),
    _shape("Gemma 2 27B", 256_000, 4608, 46, 27_227_128_320),
    _shape("Gemma 2 2B", 256_000, 2304, 26, 2_614_341_888),
    _shape("Llama 2 13B", 32_000, 5120, 40, 13_015_866_880),
    _shape("Llama 2 7B", 32_000, 4096, 32, 6_738_417_664),
    _shape("Llama 3 70B", 128_256, 8192, 80, 70_553_706_496),
    _shape("Llama 3 8B", 128_256, 4096, 32, 8_030_261_248),
    _shape("Mistral 7B", 32_000, 4096, 32, 7_241_732_096),
    _shape("Mixtral 8x7B", 32_000, 4096, 32, 46_702_792_704),
    _shape("Phi 1.5", 50_295, 2048, 24, 1_418_270_720),
    _shape("Phi 3 Medium", 32_011, 5120, 40, 13_960_238_080),
    _shape("Qwen 1.5 7B", 151_646, 4096, 32, 7_721_324_544),
)
# Models of the paper's other tables, and later ones.
MORE_MODELS = (
    _shape("Gemma 2 9B", 256_000, 3584, 42, 9_241_705_984),
    _shape("Gemma 3 1B", 262_144, 1152, 26, 999_885_952),
    _shape("Llama 3.2 1B", 128_256, 2048, 16, 1_235_814_400),
    _shape("Llama 3.2 3B", 128_256, 3072, 28, 3_212_749_824),
    _shape("Mistral NeMo 12B", 131_072, 5120, 40, 12_247_782_400),
    _shape("Phi 3.5 Mini", 32_064, 3072, 32, 3_821_079_552),
    _shape("Qwen 3 0.6B", 151_936, 1024, 28, 596_049_920),
    _shape("Qwen 3 8B", 151_936, 4096, 36, 8_190_735_360),
)
MODELS = {shape.name: shape for shape in (*PAPER_MODELS, *MORE_MODELS)}


def find_model(name: str) -> ModelShape:
    """The shape of a model by its name; case, spaces and hyphens do not matter.

    >>> find_model("gemma-2-2b").hidden
    2304
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of a model is a text, got {name!r:.60}. Write it as 'gemma 2 2b'")
    by_key = {_key(known): shape for known, shape in MODELS.items()}
    if shape := by_key.get(_key(name)):
        return shape
    near = [by_key[key].name for key in difflib.get_close_matches(_key(name), by_key, n=3)]
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"no model {name!r} in the table. {meant}`tilewise plan lm` lists all; describe any other model with "
        "--vocab, --hidden, --layers and --parameters"
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices that a model is trained on.

    Args:
        gpus: number of devices.
        memory_bytes: memory of one device.
        reserve_bytes: memory of one device that is left to libraries. The paper uses 5 GB of 80.
        workspace_bytes: workspace of tilewise on one device: `TileOptions.workspace_mib`.
        parameter_bytes: bytes of one parameter with its gradient and optimizer state. 8: everything in 16 bits. 16:
            AdamW with 32-bit weights and moments, and 16-bit copies of weights and gradients.
    """

    gpus: int = 16
    memory_bytes: int = 80 * GIB
    reserve_bytes: int = 5 * GIB
    workspace_bytes: int = 256 * MIB
    parameter_bytes: int = 8

    def __post_init__(self) -> None:
        _check_count("gpus", self.gpus)
        _check_count("parameter_bytes", self.parameter_bytes)
        _check_count("memory_bytes", self.memory_bytes)
        _check_count("reserve_bytes", self.reserve_bytes, least=0)
        _check_count("workspace_bytes", self.workspace_bytes, least=0)
        if self.usable_bytes <= self.workspace_bytes:
            raise RangeError(
                f"a GPU of {self.memory_bytes / GIB:g} GiB has nothing left after {self.reserve_bytes / GIB:g} GiB of "
                f"reserve and {self.workspace_bytes / MIB:g} MiB of workspace. Lower the reserve (--reserve-gib)"
            )

    @property
    def usable_bytes(self) -> int:
        """Of one device."""
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True)
class LmPlan:
    """The memory of a model, over all devices, and the largest batch in tokens."""

    shape: ModelShape
    cluster: Cluster
    tokens: int
    logits_bytes: int
    activations_bytes: int
    model_bytes: int
    before_tokens: int
    after_tokens: int

    @property
    def gain(self) -> float:
        """The factor by which the largest batch grows."""
        return self.after_tokens / self.before_tokens if self.before_tokens else math.inf


def plan_lm(shape: ModelShape, cluster: Cluster | None = None, tokens: int = 65_536) -> LmPlan:
    """The memory of a batch of `tokens`, and the largest batch that fits with logits and without.

    The equations are at the top of this module. A largest batch is rounded down.

    >>> plan = plan_lm(find_model("Gemma 2 2B"), Cluster(workspace_bytes=0))
    >>> plan.logits_bytes // MIB, plan.activations_bytes // MIB, plan.model_bytes // MIB
    (64000, 7488, 19945)
    >>> plan.before_tokens, plan.after_tokens, round(plan.gain, 1)
    (1108206, 10580056, 9.5)
    """
    cluster = Cluster() if cluster is None else cluster
    if not isinstance(shape, ModelShape) or not isinstance(cluster, Cluster):
        raise ConfigError(
            f"shape is a ModelShape and cluster a Cluster, got {type(shape).__name__} and {type(cluster).__name__}. "
            "Use find_model('gemma 2 2b') and Cluster(gpus=8)"
        )
    _check_count("tokens", tokens)
    logits, activations = LOGIT_BYTES * shape.vocabulary, ACTIVATION_BYTES * shape.hidden * shape.layers
    model = cluster.parameter_bytes * shape.parameters
    room = cluster.gpus * cluster.usable_bytes - model
    if room <= 0:
        least = model // cluster.usable_bytes + 1
        raise RangeError(
            f"{shape.name} takes {model / GIB:,.1f} GiB for weights, gradients and optimizer, and {cluster.gpus} x "
            f"{cluster.memory_bytes / GIB:g} GiB leave {(room + model) / GIB:,.1f}. Take at least {least} GPUs"
        )
    return LmPlan(
        shape=shape,
        cluster=cluster,
        tokens=tokens,
        logits_bytes=logits * tokens,
        activations_bytes=activations * tokens,
        model_bytes=model,
        before_tokens=room // (logits + activations),
        after_tokens=max(room - cluster.gpus * cluster.workspace_bytes, 0) // activations,
    )


def whole_sequences(tokens: int, length: int, gpus: int) -> int:
    """Return how many sequences fit into a number of tokens, with the same number of sequences on each GPU.

    >>> whole_sequences(1_108_206, 8192, 16)
    128
    """
    _check_count("sequence length", length)
    return tokens // (length * gpus) * gpus
