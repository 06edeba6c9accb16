"""Mutate the files that a trainer reads, and check that nothing hangs, nothing raises a foreign error, all is counted.

    python -m tests.train.hostile_files [COUNT] [SEED]

prints how many files of each kind were read, refused or read in part.
"""

import contextlib
import faulthandler
import io
import json
import random
import shutil
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from PIL import Image

from tilewise.errors import TilewiseError
from tilewise.train.checkpoint import open_checkpoint, save_checkpoint, step_name
from tilewise.train.config import RunConfig
from tilewise.train.data import SkipLog
from tilewise.train.data.files import Preparation
from tilewise.train.data.images import decode, known_formats
from tilewise.train.data.records import Draw, RecordError
from tilewise.train.data.shards import ShardSource
from tilewise.train.data.table import Columns, FileSource, read_table
from tilewise.train.models.saved import ABOUT, read_about
from tilewise.train.report import render
from tilewise.train.run_folder import RunFolder
from tilewise.train.settings import to_dict, to_toml
from tilewise.train.status import Status, read_status, write_status

PAIRS = 4
SLOWEST_S = 5.0  # of processor time, for one file
HANGS_S = 300.0  # then the process ends with the places of its threads
TOKENS = (b"{", b"[", b'"', b"\xff", b"\0", b"-1", b"1e999", b"9" * 20, b"null", b"[" * 5000, b"NaN", b"\n")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a flipped bit, a random byte, a cut, a repeated or removed part, a token put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(changed) + 1)
        end = min(len(changed), place + rng.choice((1, 4, 16, 512)))
        kind = rng.randrange(7)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(changed):
            changed[place] = rng.randrange(256)
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            changed[place:place] = changed[place:end]
        elif kind == 4:
            del changed[place:end]
        elif kind == 5:
            changed[place:end] = rng.choice(TOKENS)
        else:
            changed[place:end] = bytes(end - place)
    return bytes(changed)


def mutate_tar(data: bytes, rng: random.Random) -> bytes:
    """Half of the time, a header field is changed and the checksum made right, so that the reader believes it."""
    if rng.random() < 0.5:
        return mutate(data, rng)
    changed = bytearray(data)
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice(starts)
        start, end = rng.choice(((0, 100), (124, 136), (156, 157), (345, 500), (482, 483)))
        numbers = [b"\xff" * 11 + b"\0", b"\x80" + b"\xff" * 11, b"\0" * 12, b"00000001000\0"]
        value = rng.choice([rng.randbytes(end - start), bytes([rng.choice(b"01234567SLKxgXVMD\0")]), *numbers])
        changed[at + start : at + end] = value[: end - start].ljust(end - start, b"\0")
        head = changed[at : at + 512]
        changed[at + 148 : at + 156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    return bytes(changed)


# -- files that are whole ------------------------------------------------------------------------------------


def picture(kind: str = "PNG", number: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (40 * number, 90, 7)).save(buffer, kind)
    return buffer.getvalue()


def make_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for i in range(PAIRS):
            long = "n" * 120 if i == 2 else ""
            words = b"a cup" if i % 2 else json.dumps({"caption": "a cup", "sku": i}).encode()
            for suffix, content in (("png", picture(number=i)), ("txt" if i % 2 else "json", words)):
                info = tarfile.TarInfo(f"{i}{long}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_pictures() -> list[bytes]:
    found = []
    for kind in known_formats():
        with contextlib.suppress(OSError, KeyError):  # some can be read, but not written
            found.append(picture(kind))
    return found


def make_tables(folder: Path) -> dict[str, bytes]:
    import pyarrow
    import pyarrow.parquet

    names = [f"{i}.png" for i in range(PAIRS)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(picture(number=i))
    rows = [{"image": name, "caption": f"cup {i}", "sku": i} for i, name in enumerate(names)]
    coco = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [{"image_id": i, "caption": "a cup", "sku": i} for i in range(PAIRS)],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "made.parquet")
    lines = [",".join(map(str, row.values())) for row in rows]
    return {
        ".csv": ("image,caption,sku\n" + "\n".join(lines) + "\n").encode(),
        ".tsv": ("image,caption,sku\n" + "\n".join(lines) + "\n").replace(",", "\t").encode(),
        ".jsonl": "\n".join(map(json.dumps, rows)).encode(),
        ".json": json.dumps(coco).encode(),
        ".parquet": (folder / "made.parquet").read_bytes(),
    }


def make_run(folder: Path) -> None:
    memory = {"data": 1, "loss": 2, "backbone": 3, "dense_loss": 4, "measured": True, "peak": 4, "dense_peak": 5}
    state = {
        "position": {"epoch": 0, "window": 0, "offset": 5}, "skips": {"counts": {"no caption": 3}, "once": []},
        "skipped": 3, "best": {"step": 3.0, "value": 0.5}, "metrics": {"t2i_r10": 0.5}, "scaler": {}, "memory": memory,
        "plan": [[0, 9, "plan"]], "pairs": 40, "config": to_dict(RunConfig()),
    }  # fmt: skip
    save_checkpoint(folder / "checkpoints", 3, {"model": {"w": torch.ones(3)}}, state)
    train = {"kind": "train", "loss": 3.5, "scale": 10.0, "grad_norm": 1.0, "seconds": 0.5, "rows": 64}
    recall = {f"{side}_{what}{k}": 0.5 for side in ("t2i", "i2t") for what in ("r", "chance") for k in (1, 5, 10)}
    lines = [{"step": 1, **train}, {"step": 2, **train}, {"step": 3, "kind": "eval", **recall}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(to_toml(RunConfig()))
    write_status(folder, Status("stopped", 3, 9, 15))
    (folder / "model").mkdir()
    (folder / "model" / ABOUT).write_text(json.dumps({"format": 1, "kind": "icon", "sizes": {"width": 32}}))


# -- what is done with a mutated file ------------------------------------------------------------------------


def try_tar(path: Path) -> str:
    skips = SkipLog()
    try:
        source = ShardSource([str(path)], Preparation(8), shuffle_shards=1, records=0, workers=1, skips=skips)
    except TilewiseError:
        assert skips.total, "all pairs are gone, and nothing is counted"
        return "refused"
    rows = source.rows(torch.tensor(source.all_keys()), Draw(0, 0, 0, 0, len(source)), skips)
    assert len(rows.ids) + rows.left_out == len(source)
    if len(rows.ids) < PAIRS:
        assert skips.total >= 1, f"{PAIRS - len(rows.ids)} pairs are gone, and nothing is counted"
        return "read in part"
    return "read"


def try_picture(data: bytes) -> str:
    try:
        decode(data)
        return "read"
    except RecordError:
        return "refused"


def try_table(path: Path) -> str:
    try:
        entries = read_table(path, str(path.parent), Columns("image", "caption", "sku"))
    except TilewiseError:
        return "refused"
    skips = SkipLog()
    rows = FileSource(entries, Preparation(8), 1).rows(
        torch.arange(len(entries)), Draw(0, 0, 0, 0, len(entries)), skips
    )
    assert len(rows.ids) + skips.total == len(entries), "a skipped record is not counted"
    return "read" if len(rows.ids) >= PAIRS else "read in part"


def try_run(folder: Path, whole: dict[str, object]) -> str:
    run, refused = RunFolder(folder), 0
    memory, skipped, config = {}, {}, RunConfig()
    try:
        state = open_checkpoint(folder / "checkpoints" / step_name(3)).state
        assert state == whole, "a changed state was believed"
        memory, skipped = state["memory"], state["skips"]["counts"]
    except TilewiseError:
        refused += 1
    try:
        config = run.read_config()
    except TilewiseError:
        refused += 1
    for read in (lambda: read_status(folder).sentence(), lambda: read_about(run.model)):
        try:
            read()
        except TilewiseError:
            refused += 1
    lines, damaged = run.check_metrics()
    render(config, lines, [], memory, skipped)
    return "refused" if refused else "read in part" if damaged else "read"


def check(count: int, seed: int, folder: Path) -> dict[str, Counter[str]]:
    """Mutate `count` files. A foreign error, a file that takes seconds or a record that is not counted raises."""
    rng = random.Random(seed)
    tar, pictures, tables = make_tar(), make_pictures(), make_tables(folder)
    make_run(folder / "run")
    whole = json.loads((folder / "run" / "checkpoints" / step_name(3) / "state.json").read_text())
    run_files = [p for p in (folder / "run").rglob("*") if p.is_file()]
    found: dict[str, Counter[str]] = {kind: Counter() for kind in ("tar", "image", "table", "run")}
    for number in range(count):
        kind = ("tar", "image", "table", "run")[number % 4]
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        start = time.process_time()
        try:
            if kind == "tar":
                (folder / "x.tar").write_bytes(mutate_tar(tar, rng))
                result = try_tar(folder / "x.tar")
            elif kind == "image":
                result = try_picture(mutate(rng.choice(pictures), rng))
            elif kind == "table":
                suffix = rng.choice(list(tables))
                (folder / f"x{suffix}").write_bytes(mutate(tables[suffix], rng))
                result = try_table(folder / f"x{suffix}")
            else:
                file = rng.choice(run_files)
                before = file.read_bytes()
                file.write_bytes(mutate(before, rng))
                try:
                    result = try_run(folder / "run", whole)
                finally:
                    file.write_bytes(before)
        except Exception as error:
            raise AssertionError(f"file {number} ({kind}) of seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        taken = time.process_time() - start
        assert taken < SLOWEST_S, f"file {number} ({kind}) of seed {seed} took {taken:.1f} s"
        found[kind][result] += 1
    return found


def main() -> None:
    count, seed = (int(text) for text in (*sys.argv[1:], *("2000", "0")[len(sys.argv) - 1 :]))
    warnings.filterwarnings("ignore", module=r"PIL\.")
    folder = Path(tempfile.mkdtemp())
    start = time.monotonic()
    try:
        for kind, results in check(count, seed, folder).items():
            print(f"{kind:<6} {dict(results)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{count} files in {time.monotonic() - start:.0f} s, seed {seed}: no hang, no foreign error, all counted")


if __name__ == "__main__":
    main()
