"""The command line: ``tilewise --help`` lists the commands.

Heavy imports are inside the commands that need them, so that ``tilewise --help`` is quick.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:  # without the extra `train`, the command is installed and its packages are not
    sys.exit(f"tilewise: the command line needs {error.name}. In a clone: pip install '.[train]'")

from tilewise.train.plan_cli import plan_app

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, or of the copy of click in typer
app = typer.Typer(name="tilewise", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(plan_app, name="plan")

Overrides = Annotated[list[str] | None, typer.Argument(help="settings that override the file: section.key=value")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Which = Annotated[
    str,
    typer.Option(
        help="checkpoint to use: best, last, or a step that was kept; an error if it is missing or damaged. "
        "auto: the best one, or another one if that is not possible"
    ),
]


def _console() -> Any:
    from tilewise.train.terminal import Terminal

    return Terminal()


def _say(console: Any, line: str) -> None:
    from tilewise.train.terminal import say

    say(console, line)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as installed

        print(f"tilewise {installed('tilewise')}, torch {installed('torch')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Train and try image-text models with exact contrastive losses whose memory is linear in the batch."""


def _check_together(needed: str, given: object, options: dict[str, object]) -> None:
    """Refuse options that have no effect without another one."""
    from tilewise.errors import RangeError

    for name, value in options.items():
        if value and not given:
            raise RangeError(f"{name} has an effect only together with {needed}. Give both, or neither")


def _is_first() -> bool:
    """Return whether this is the first rank. Only that rank prints."""
    return os.environ.get("RANK", "0") == "0"


@app.command(context_settings={"ignore_unknown_options": True})  # --loop.steps=3 gets our own error message
def train(
    config: Annotated[
        str, typer.Argument(help="a TOML file with settings; may be left out if settings are given")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Train a run, or continue a run that was stopped. Start it with torchrun to use several ranks.

    The shortest form is `tilewise train data.path=FOLDER`, for a folder of images with captions.
    """
    from tilewise.errors import ConfigError
    from tilewise.train.config import load_config
    from tilewise.train.settings import changed_settings
    from tilewise.train.status import check_free

    if not config:
        raise ConfigError(
            "train needs settings. Give a TOML file (`tilewise config` prints one), or settings such as "
            "data.path=FOLDER for a folder of images with captions. `tilewise demo` trains on the icons that ship"
        )
    given = list(overrides or [])
    file: Path | None = Path(config)
    if "=" in config and not os.path.isfile(config):  # False for a name that is too long, too
        file, given = None, [config, *given]
    elif os.path.isdir(config) and not (Path(config) / "config.toml").is_file():
        raise ConfigError(f"{config} is a folder. To train on the images in it: tilewise train data.path={config}")
    console = _console()
    settings = load_config(file, given)
    if _is_first():  # before torch is imported, so that the user sees at once that the run starts
        check_free(Path(settings.output.folder))
        for section, line in changed_settings(settings).items():
            _say(console, f"{section:<7} {line}")

    from tilewise.train.loop import train as run
    from tilewise.train.run_folder import check_not_moved

    if file is not None:
        check_not_moved(file, settings, given)
    _leave(run(settings, console), console, quiet=not _is_first())


@app.command(context_settings={"ignore_unknown_options": True})
def demo(overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None) -> None:
    """Train on the icons that ship with tilewise, and show the results."""
    from tilewise.train.demo import run_demo

    console = _console()
    result = run_demo(console, overrides or [])
    _leave(result, console, quiet=result.finished)


def _leave(result: Any, console: Any, quiet: bool = False) -> None:
    if result.signal_number and not result.finished:
        if _is_first():
            after = f"after step {result.step}; saved" if result.step else "before the first step"
            _say(console, f"stopped {after}. The same command continues the run")
        raise typer.Exit(128 + result.signal_number)
    if not quiet:
        _say(console, f"done: {result.step} steps in {result.folder}")
        if (result.folder / "report.html").is_file():
            _say(console, f"report: {(result.folder / 'report.html').resolve()}")
        if result.metrics:  # there are held-out pairs
            from tilewise.train.demo import own_command

            _say(console, f"next:   {own_command()} search {result.folder} WORDS")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    pairs: Annotated[
        str, typer.Option(help="other held-out pairs: a folder, table, COCO captions file or shards")
    ] = "",
    images: Annotated[str, typer.Option(help="base folder of relative image paths in `pairs`")] = "",
    image_column: Annotated[
        str, typer.Option(help="image column of a table in `pairs`; default: data.image_column of the run")
    ] = "",
    text_column: Annotated[
        str, typer.Option(help="caption column of a table in `pairs`; default: data.text_column of the run")
    ] = "",
    id_column: Annotated[
        str, typer.Option(help="column of `pairs` whose equal values are right answers of one another; default: none")
    ] = "",
    own_captions: Annotated[
        bool,
        typer.Option(
            "--own-captions",
            help="captions are right for their own images only, as in the usual scores of Flickr30k and COCO. "
            "Default: also for images with an equal caption",
        ),
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="new folder for the rank of every right answer, and files of TREC and BEIR"),
    ] = None,
    zero_shot: Annotated[Path | None, typer.Option(help="folder with one sub-folder of images per class")] = None,
    template: Annotated[list[str] | None, typer.Option(help="sentence with {} for the class; may be repeated")] = None,
    checkpoint: Which = "auto",
    device: Device = "auto",
) -> None:
    """Compute recall, MRR, MAP and NDCG in both directions. With --zero-shot, also classify images by class names."""
    from tilewise.train.evaluate_run import Evaluation, evaluate_run

    _check_together(
        "--pairs", pairs,
        {"--images": images, "--image-column": image_column, "--text-column": text_column, "--id-column": id_column},
    )  # fmt: skip
    _check_together("--zero-shot", zero_shot, {"--template": template})
    what = Evaluation(
        pairs, images, image_column, text_column, id_column, own_captions, zero_shot, tuple(template or ("{}",)), export
    )
    evaluate_run(_console(), run, what, device, checkpoint)


@app.command()
def search(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    queries: Annotated[
        list[str] | None, typer.Argument(help="words to search for; quote a query of several words")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="image file to find captions for, instead of words; may be repeated")
    ] = None,
    top: Annotated[int, typer.Option(help="number of results per query", min=1)] = 10,
    sheet: Annotated[Path | None, typer.Option(help="PNG file to write; default: search.png in the run folder")] = None,
    pairs: Annotated[str, typer.Option(help="search in other pairs: a folder, table or shards")] = "",
    images: Annotated[str, typer.Option(help="base folder of relative image paths in `pairs`")] = "",
    checkpoint: Which = "auto",
    device: Device = "auto",
) -> None:
    """Find images by words, or captions by an image, among the held-out pairs of a run or other pairs.

    If the query is a caption or an image of these pairs, right answers have a star, and a green frame in the sheet.
    """
    from tilewise.errors import RangeError
    from tilewise.train.search import open_gallery, save_sheet, show_hits

    if not queries and not image:
        raise RangeError("search needs words, or --image with an image file")
    _check_together("--pairs", pairs, {"--images": images})
    _check_together("words to search for", queries, {"--sheet": sheet})
    console = _console()
    gallery = open_gallery(run, device, console, pairs, images, checkpoint)
    for file, hits in zip(image or [], gallery.captions(image, top) if image else [], strict=True):
        show_hits(console, str(file), hits)
    if queries:
        found = gallery.search(queries, top)
        for query, hits in zip(queries, found, strict=True):
            show_hits(console, query, hits)
        _say(console, f"sheet: {save_sheet(sheet or run / 'search.png', queries, found)}")
    if not pairs:
        _say(console, f"searched {len(gallery.features):,} held-out images; --pairs PATH searches in others")


@app.command()
def mine(
    source: Annotated[Path, typer.Argument(help="the folder of a run, or a file with the features of queries")],
    file: Annotated[Path, typer.Argument(help="file to write, with the ending .jsonl or .parquet")],
    gallery: Annotated[
        Path | None, typer.Option(help="file with the features of the gallery; needed if SOURCE is a file")
    ] = None,
    positives: Annotated[
        Path | None, typer.Option(help="file with the right items of each query, -1 for none; default: item i")
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="scale features in files to length 1")] = False,
    to_text: Annotated[
        bool, typer.Option("--to-text", help="images are queries and captions are found; default: the other way round")
    ] = False,
    pairs: Annotated[
        str, typer.Option(help="pairs to mine: a folder, table or shards; default: the training pairs of the run")
    ] = "",
    images: Annotated[str, typer.Option(help="base folder of relative image paths in `pairs`")] = "",
    num_negatives: Annotated[int, typer.Option(help="negatives of each query")] = 3,
    range_min: Annotated[int, typer.Option(help="number of the closest candidates to leave out")] = 0,
    range_max: Annotated[int | None, typer.Option(help="number of candidates to rank; default: enough")] = None,
    max_score: Annotated[float | None, typer.Option(help="highest score of a negative")] = None,
    min_score: Annotated[float | None, typer.Option(help="lowest score of a negative")] = None,
    absolute_margin: Annotated[
        float | None, typer.Option(help="how much lower than every right answer a negative scores")
    ] = None,
    relative_margin: Annotated[float | None, typer.Option(help="the same, as a share of that score")] = None,
    sampling_strategy: Annotated[str, typer.Option(help="top: the closest, or random: any of the range")] = "top",
    seed: Annotated[int, typer.Option(help="of the random choice")] = 0,
    output_format: Annotated[str, typer.Option(help="triplet, n-tuple, labeled-pair or labeled-list")] = "triplet",
    output_scores: Annotated[bool, typer.Option("--output-scores", help="also write the scores")] = False,
    checkpoint: Which = "auto",
    device: Device = "auto",
) -> None:
    """Write a training set with hard negatives: items that are close to a query, but wrong."""
    from tilewise.errors import RangeError
    from tilewise.train.mine import check_target, search_of_files, search_of_run
    from tilewise.train.mine import mine as run_mine

    check_target(file)
    if source.is_file() != (gallery is not None):
        raise RangeError(
            "--gallery and a file of features belong together; the folder of a run has both. Give both, or none"
        )
    _check_together("--gallery", gallery, {"--positives": positives, "--normalize": normalize})
    _check_together("the folder of a run", source.is_dir(), {"--pairs": pairs, "--to-text": to_text})
    _check_together("--pairs", pairs, {"--images": images})
    console = _console()
    if gallery is not None:
        what = search_of_files(source, gallery, positives, normalize)
    else:
        what = search_of_run(console, source, to_text, pairs, images, checkpoint, device)
    run_mine(
        console, what, file, output_format, output_scores, num_negatives=num_negatives, range_min=range_min,
        range_max=range_max, max_score=max_score, min_score=min_score, absolute_margin=absolute_margin,
        relative_margin=relative_margin, sampling_strategy=sampling_strategy, seed=seed,
    )  # fmt: skip


@app.command()
def embed(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    file: Annotated[Path, typer.Argument(help="file to write, with the ending .safetensors")],
    pairs: Annotated[str, typer.Option(help="encode other pairs: a folder, table or shards")] = "",
    images: Annotated[str, typer.Option(help="base folder of relative image paths in `pairs`")] = "",
    checkpoint: Which = "auto",
    device: Device = "auto",
) -> None:
    """Write the features of images and captions as safetensors, and their names to a JSON file of the same name."""
    from tilewise.train.embed import embed_pairs

    _check_together("--pairs", pairs, {"--images": images})
    console = _console()
    for written in embed_pairs(console, run, file, pairs, images, checkpoint, device):
        _say(console, f"written: {written}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    checkpoint: Which = "auto",
    device: Device = "auto",
) -> None:
    """Write report.html for a run in any state: finished, running, stopped, killed or failed."""
    from tilewise.train.report import report_run

    console = _console()
    _say(console, f"report: {report_run(console, run, device, checkpoint).resolve()}")


@app.command()
def status(run: Annotated[Path, typer.Argument(help="the folder of a run")]) -> None:
    """Show whether a run has finished (exit code 0), was stopped or killed (75), failed (1) or is running (3)."""
    from tilewise.train.status import read_status

    found = read_status(run)
    _say(_console(), found.sentence())
    raise typer.Exit(found.exit_code)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    folder: Annotated[Path, typer.Argument(help="folder to write; it must not exist, or must be empty")],
    checkpoint: Which = "auto",
) -> None:
    """Write the model of a run as safetensors and JSON. transformers can load towers of its own architectures."""
    from tilewise.train.inference import open_model

    console = _console()
    model = open_model(run, device="cpu", checkpoint=checkpoint, console=console)
    target = model.export(folder)
    _say(console, f"exported {model.origin} to {target}")
    _say(console, f"in Python:  tilewise.train.load_model({str(target)!r})")
    for line in model.readers(target):
        _say(console, f"or:         {line}")


@app.command(name="config")
def show_config(overrides: Overrides = None) -> None:
    """Print every setting with its help and its default, as TOML."""
    from tilewise.train.config import RunConfig
    from tilewise.train.settings import apply_overrides, build, to_toml

    print(to_toml(build(RunConfig, apply_overrides({}, overrides or [])), help=True))  # which has no control characters


@app.command()
def tune(
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16 or float32; may be repeated. Default: both")] = None,
    width: Annotated[list[int] | None, typer.Option(help="features of a row; may be repeated", min=16)] = None,
    jobs: Annotated[int | None, typer.Option(help="processes that compile side by side", min=1)] = None,
    table: Annotated[bool, typer.Option("--table", help="also print rows for the size table of the source")] = False,
    device: Annotated[str | None, typer.Option(help="such as cuda:1. Default: the first")] = None,
) -> None:
    """Measure tile sizes of the kernels on this GPU, and use the best ones from now on. Takes some minutes."""
    from tilewise.tools.tune import Untunable
    from tilewise.tools.tune_cli import run_tune
    from tilewise.train.terminal import say_error

    try:
        code = run_tune(_console(), dtype, width, jobs, table, device)
    except Untunable as error:
        say_error(error)
        code = 2
    raise typer.Exit(code)


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Show versions, devices and how losses are computed here. Exit code 1 if something is wrong."""
    from tilewise.tools.doctor import check_up
    from tilewise.train.untrusted import visible

    found = check_up()
    print(found.as_json() if json else visible(str(found)))
    raise typer.Exit(found.exit_code)


def main() -> None:
    """Entry point. Known errors are shown as one sentence, without a traceback. It is safe to print any text."""
    from tilewise.errors import TilewiseError
    from tilewise.train.signals import end_on_signals
    from tilewise.train.terminal import accept_any_text, say_error
    from tilewise.train.untrusted import visible

    end_on_signals()
    accept_any_text()
    threading.excepthook = _end_of_thread
    warnings.filterwarnings("ignore", module=r"PIL\.")  # damaged images are skipped and counted, not reported twice
    code = 1
    try:
        result = app(prog_name="tilewise", standalone_mode=False)
        print(end="", flush=True)  # here, so that a full disk is noticed; without an output nothing happens
        code = result
    except UsageError as error:
        if message := error.format_message():  # empty where the help was shown instead
            command = error.ctx.command_path if error.ctx else "tilewise"
            say_error(f"{message.rstrip('.')}. `{command} --help` shows what it takes")
        code = error.exit_code
    except TilewiseError as error:
        say_error(error)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of the output has seen enough
            say_error(_refusal(error))
        if not error.filename:  # what could not be printed would be printed again at the end of Python
            with suppress(OSError, AttributeError):  # a standard output without a number, or none
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        say_error("there is not enough memory. Lower loop.batch_size, loop.chunk_size or data.workers")
    except Exception:  # a fault of this program; the message may quote data
        print(visible(traceback.format_exc()), file=sys.stderr, end="")
    sys.exit(code)


def _end_of_thread(end: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, except what TensorBoard could not write. The run gets that error, too."""
    if not isinstance(end.exc_value, OSError):
        threading.__excepthook__(end)


def _refusal(error: OSError) -> str:
    """Return what the operating system refused, as a sentence."""
    name = str(error.filename or "the output")
    name = f"{name[:60]}... ({len(name)} characters)" if len(name) > 200 else name
    return f"cannot read or write {name}: {error.strerror or error}. Check the path, its permissions and its disk"


if __name__ == "__main__":
    main()
