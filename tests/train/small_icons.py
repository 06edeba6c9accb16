"""Write a file with a few hundred of the icons that ship, so that runs in tests start quickly."""

from importlib.resources import files
from pathlib import Path

from tilewise.train.icons.pack import read_pack, write_pack

OWN = ("format", "version", "count", "side", "unpacked")


def write_small_icons(path: Path, train: int = 400, test: int = 60) -> Path:
    pack = read_pack(Path(str(files("tilewise.train.icons").joinpath("icons.zip"))))
    held_out = set(pack.manifest["test_families"])
    keys = [family["key"] for family in pack.manifest["families"]]
    which = [keys[f] in held_out if isinstance(f, int) else f in held_out for f in pack.columns["family"]]
    chosen = [i for i, out in enumerate(which) if not out][:: sum(not w for w in which) // train][:train]
    chosen += [i for i, out in enumerate(which) if out][:: sum(which) // test][:test]
    columns = {name: [column[i] for i in chosen] for name, column in pack.columns.items()}
    about = {key: value for key, value in pack.manifest.items() if key not in OWN}
    write_pack(path, pack.levels[chosen].contiguous(), columns, about)
    return path
