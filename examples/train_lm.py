"""Train a small causal language model with a vocabulary of 102,400 on the CPU, without storing its logits.

    python examples/train_lm.py                          two cores: two to three minutes, nothing is downloaded
    python examples/train_lm.py --steps 1000 --cache runs/lm
    python examples/train_lm.py --save runs/lm/model     keep the model, for transformers' from_pretrained
    python examples/train_lm.py --text ~/notes           your own .txt, .md, .rst and .py files

The text is on every machine: the sources and docstrings of Python's standard library, torch and transformers. The
tokenizer is a byte-level BPE of that text. It is trained once and kept in the --cache folder. The model is a Llama of
transformers with random weights. Only one line is ours: `use_linear_cross_entropy(model)`.

Axes: b sequences, t tokens of a sequence, v entries of the vocabulary, d features.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tilewise as tw
from tilewise.integrations.transformers import use_linear_cross_entropy

if TYPE_CHECKING:
    from rich.table import Table

END = "<|end|>"
SUFFIXES = {".py", ".txt", ".md", ".rst"}
SMALLEST_VOCABULARY = 257  # all bytes, and the end token


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the model and of training."""

    steps: int = 150
    batch: int = 8
    length: int = 128
    vocabulary: int = 102_400
    hidden: int = 128
    layers: int = 4
    lr: float = 2e-3
    warmup: int = 10
    held_out: int = 4096  # tokens
    seed: int = 0
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    options: tw.TileOptions | None = field(default_factory=tw.TileOptions)  # None: the model's own loss, with logits

    @property
    def tokens(self) -> int:
        """Number of tokens per step whose next token is predicted."""
        return self.batch * (self.length - 1)


# Text and tokenizer


def default_folders() -> list[Path]:
    """Folders of text that every installation has: the standard library, torch and transformers."""
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in ("torch", "transformers"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders


def read_texts(folders: Sequence[Path], megabytes: float) -> list[str]:
    """Texts of about `megabytes` in total, from files in a fixed pseudo-random order."""
    files = []
    for folder in folders:
        for place, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
            files += [Path(place, name) for name in names if Path(name).suffix in SUFFIXES]
    texts, room = [], round(1e6 * megabytes)
    for file in sorted(files, key=lambda file: hashlib.sha256("/".join(file.parts[-3:]).encode()).digest()):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not 200 < len(text) < 300_000:  # nearly empty, or a table of data
            continue
        texts.append(text)
        room -= len(text)
        if room <= 0:
            break
    if not texts:
        raise SystemExit(f"no text in {', '.join(map(str, folders))}. Files must end in {', '.join(sorted(SUFFIXES))}")
    return texts


def cache_for(folders: Sequence[Path] | None, cache: Path) -> Path:
    """The folder of the tokenizer: the cache for the default text, a folder inside of it for other texts."""
    if not folders:
        return cache
    places = "\n".join(sorted(str(folder.resolve()) for folder in folders))
    return cache / f"text-{hashlib.sha256(places.encode()).hexdigest()[:8]}"


def open_tokenizer(texts: Sequence[str], vocabulary: int, cache: Path) -> Tokenizer:
    """The byte-level BPE in the cache, or a new one that is trained on the texts."""
    path = cache / f"bpe-{vocabulary}.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=0,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocabulary:
        raise SystemExit(
            f"this text gives a vocabulary of {tokenizer.get_vocab_size():,}, not {vocabulary:,}. "
            "Pass more text (--text) or a smaller --vocabulary"
        )
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def encode(texts: Sequence[str], tokenizer: Tokenizer, count: int) -> Tensor:
    """The first `count` tokens of the texts, or all of them: (tokens,) int64."""
    end, ids = tokenizer.token_to_id(END), []
    for start in range(0, len(texts), 16):
        for encoded in tokenizer.encode_batch(list(texts[start : start + 16])):
            ids += [*encoded.ids, end]
        if len(ids) >= count:
            break
    return torch.tensor(ids[:count])


def sequences(tokens: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Endless batches (b, t) of sequences from random positions."""
    if len(tokens) <= settings.length:
        raise SystemExit(
            f"{len(tokens)} tokens of text are fewer than one sequence of {settings.length}. Pass more text"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        starts = torch.randint(len(tokens) - settings.length, (settings.batch,), generator=generator)
        yield tokens[starts[:, None] + torch.arange(settings.length)]


# Training


def build_model(settings: Settings) -> LlamaForCausalLM:
    """A small Llama with random weights. Embedding and head share one matrix."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(1, settings.hidden // (32 if settings.hidden < 512 else 64)),
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(settings.device)


def train(
    model: nn.Module, tokens: Tensor, settings: Settings, watch: Callable[[int, Tensor], Any] = lambda step, loss: None
) -> list[float]:
    """Train for some steps, or until `watch` returns True. Returns the loss of each step.

    The learning rate warms up and then falls to a tenth along a cosine. `watch` is called with the number of each step
    and its loss, a tensor. Reading the loss makes the host wait for the device.
    """
    cuda = settings.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=cuda)
    low_precision = torch.autocast(settings.device, torch.bfloat16, enabled=cuda)
    losses = []
    model.train()
    with contextlib.ExitStack() as stack:
        if settings.options is not None:
            stack.enter_context(use_linear_cross_entropy(model, options=settings.options))
        for step, batch in zip(range(settings.steps), sequences(tokens, settings), strict=False):
            warm = min(1.0, (step + 1) / max(1, settings.warmup))
            rate = 0.55 + 0.45 * math.cos(math.pi * step / settings.steps)
            optimizer.param_groups[0]["lr"] = settings.lr * warm * rate
            batch = batch.to(settings.device)
            with low_precision:
                loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            if watch(step, losses[-1]) is True:
                break
    return torch.stack(losses).tolist() if losses else []


@torch.no_grad()
def hidden_states(model: nn.Module, tokens: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Hidden states before the head, (n, d), and the next token of each, (n,)."""
    model.eval()
    whole = tokens[: len(tokens) // settings.length * settings.length].view(-1, settings.length).to(settings.device)
    states = [model.model(input_ids=part).last_hidden_state[:, :-1] for part in whole.split(settings.batch)]
    return torch.cat(states).flatten(0, 1), whole[:, 1:].flatten()


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, settings: Settings) -> dict[str, float]:
    """Loss and accuracy on held-out text. Accuracy comes from ranks, without logits: rank 0 is the right token."""
    hidden, target = hidden_states(model, tokens, settings)
    head = model.get_output_embeddings().weight
    ranks = tw.retrieval_ranks(hidden, head, target)
    recall = tw.recall_at_k(ranks, (1, 10))
    loss = tw.linear_cross_entropy(hidden, head, target)
    return {"loss": loss.item(), "accuracy": recall[1], "among_10": recall[10], "tokens": float(len(target))}


@torch.no_grad()
def continue_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int = 24) -> str:
    """The most likely continuation. Generation uses logits as usual."""
    model.eval()
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=next(model.parameters()).device)
    for _ in range(count):
        logits = model(input_ids=ids, logits_to_keep=1).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return str(tokenizer.decode(ids[0].tolist()))


def save(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Save model and tokenizer for ``AutoModelForCausalLM`` and ``AutoTokenizer``."""
    model.save_pretrained(folder)  # type: ignore[operator]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


# The program


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("steps", "batch", "length", "vocabulary", "hidden", "layers", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument(
        "--megabytes", type=float, default=36.0, help="size of the text that the tokenizer is trained on"
    )
    parser.add_argument("--text", type=Path, nargs="*", help="folders of text, instead of the installed packages")
    parser.add_argument("--cache", type=Path, default=Path("runs/lm"), help="folder that keeps the tokenizer")
    parser.add_argument("--save", type=Path, help="folder for model and tokenizer, in the format of transformers")
    parser.add_argument(
        "--filter-tolerance", type=float, default=0.0, help="largest probability that backward may drop"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and show the results. Returns them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    arguments = parse(argv)
    names = ("steps", "batch", "length", "vocabulary", "hidden", "layers", "seed", "lr")
    for name, least in {"steps": 1, "batch": 1, "length": 2, "vocabulary": SMALLEST_VOCABULARY}.items():
        if getattr(arguments, name) < least:
            raise SystemExit(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    try:
        options = tw.TileOptions(filter_tolerance=arguments.filter_tolerance)
    except tw.TilewiseError as error:
        raise SystemExit(f"--filter-tolerance: {error}") from None
    settings = Settings(**{name: getattr(arguments, name) for name in names}, options=options)
    if arguments.save is not None:
        try:  # before training, so that an error costs no time
            arguments.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(
                f"--save needs a folder that can be written, got {arguments.save} ({error.strerror})"
            ) from None
    console = Console()
    start = time.perf_counter()
    with console.status("reading text, training the tokenizer (once)"):
        texts = read_texts(arguments.text or default_folders(), arguments.megabytes)
        tokenizer = open_tokenizer(texts, settings.vocabulary, cache_for(arguments.text, arguments.cache))
        kept = max(settings.held_out, settings.length)  # evaluation needs whole sequences
        wanted = min(2 * settings.steps * settings.batch * settings.length, 5_000_000) + kept
        tokens = encode(texts, tokenizer, wanted)
    held_out, tokens = tokens[:kept], tokens[kept:]
    console.print(
        f"{len(tokens):,} tokens of text, vocabulary {settings.vocabulary:,} ({time.perf_counter() - start:.0f} s)",
        highlight=False,
    )
    model = build_model(settings)
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=settings.steps, words="")

        def watch(step: int, loss: Tensor) -> None:
            rate = (step + 1) * settings.tokens / (time.perf_counter() - start)
            words = f"loss {loss:.3f}  {rate:,.0f} tokens/s"
            progress.update(task, advance=1, words=words)
            if not console.is_terminal and step % max(1, settings.steps // 10) == 0:  # a file shows no bar
                console.print(f"step {step}: {words}", highlight=False)

        losses = train(model, tokens, settings, watch)
    seconds = time.perf_counter() - start
    found = evaluate(model, held_out, settings)
    result = {
        "first_loss": losses[0],
        "last_loss": sum(losses[-10:]) / len(losses[-10:]),
        "held_out_loss": found["loss"],
        "accuracy": found["accuracy"],
        "among_10": found["among_10"],
        "tokens_per_second": settings.steps * settings.tokens / seconds,
        "logits_bytes": 4.0 * settings.batch * settings.length * settings.vocabulary,
        "seconds": seconds,
    }
    console.print(result_table(result, settings))
    written = continue_text(model, tokenizer, "import os\n\ndef ").splitlines()
    written = [line.rstrip()[:76] for line in written if line.strip()]
    console.print("\n".join(written[:6]), style="dim", highlight=False, markup=False)
    if arguments.save is not None:
        save(model, tokenizer, arguments.save)
        console.print(
            f"saved: AutoModelForCausalLM.from_pretrained({str(arguments.save)!r})", highlight=False, markup=False
        )
    return result


def result_table(result: dict[str, float], settings: Settings) -> Table:
    """The results as a table."""
    from rich.table import Table

    table = Table(title=f"{settings.steps} steps of {settings.tokens:,} tokens, vocabulary {settings.vocabulary:,}")
    table.add_column("")
    table.add_column("", justify="right")
    chance = math.log(settings.vocabulary)
    table.add_row("loss of the first step (chance)", f"{result['first_loss']:.3f} ({chance:.3f})")
    table.add_row("loss of the last ten", f"{result['last_loss']:.3f}")
    table.add_row("loss on held-out text", f"{result['held_out_loss']:.3f}")
    table.add_row("right next token", f"{100 * result['accuracy']:.1f} %")
    table.add_row("among the first ten", f"{100 * result['among_10']:.1f} %")
    table.add_row("tokens/s", f"{result['tokens_per_second']:,.0f}")
    table.add_row("logits that were never stored", f"{result['logits_bytes'] / 2**20:,.0f} MiB per step")
    return table


if __name__ == "__main__":
    main()
