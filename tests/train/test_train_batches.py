"""Batches of a run: order, crops of images, augmentation of icons, and the thread that makes batches."""

import io
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tests.train.small_pictures import picture, stream

from tilewise.errors import ConfigError, DataError
from tilewise.train.config import DataConfig
from tilewise.train.data import Order, Position, SkipLog, images, open_source
from tilewise.train.data.icons import IconSource, augment_icons
from tilewise.train.data.images import centre_box, decode, random_box, to_tensor
from tilewise.train.data.records import Draw, RecordError
from tilewise.train.icons import load_icons


class Numbers:
    """A source of numbers, in windows of `size`."""

    def __init__(self, total, size):
        self.total, self.size = total, size

    def __len__(self):
        return self.total

    def window_count(self):
        return -(-self.total // self.size)

    def window_keys(self, seed, epoch, window):
        return torch.arange(window * self.size, min(self.total, (window + 1) * self.size))


# -- order ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(5, 60), st.integers(1, 20), st.integers(1, 5))
def test_an_epoch_meets_every_pair_at_most_once_and_a_restart_changes_nothing(total, window, batch):
    order, position = Order(Numbers(total, window), seed=3), Position()
    seen, restarted = {}, []
    for _ in range(2 * (total // batch)):
        again, _, _ = Order(Numbers(total, window), seed=3).take(position, batch)  # as after a restart
        keys, epoch, position = order.take(position, batch)
        restarted.append(torch.equal(keys, again))
        seen.setdefault(epoch, []).append(keys)
    assert all(restarted)
    assert sorted(seen) == [0, 1]
    for parts in seen.values():
        keys = torch.cat(parts)
        assert len(keys) == len(keys.unique()) == batch * (total // batch)
    assert min(total, window) < 10 or not torch.equal(torch.cat(seen[0]), torch.cat(seen[1]))


def test_order_depends_on_the_seed():
    first = Order(Numbers(100, 100), 0).take(Position(), 50)[0]
    assert torch.equal(first, Order(Numbers(100, 100), 0).take(Position(), 50)[0])
    assert not torch.equal(first, Order(Numbers(100, 100), 1).take(Position(), 50)[0])


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match="batch of 11"):
        Order(Numbers(10, 4), 0).take(Position(), 11)
    with pytest.raises(DataError, match=r"loop\.batch_size"):
        stream(Numbers(10, 4), 11)


# -- images --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_random_boxes_lie_inside_and_keep_their_limits(width, height, seed):
    left, top, right, bottom = random_box(width, height, (0.08, 1.0), (0.75, 4 / 3), random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_boxes_have_the_papers_areas_and_ratios():
    rng = random.Random(0)
    boxes = [random_box(400, 400, (0.08, 1.0), (0.75, 4 / 3), rng) for _ in range(3000)]
    areas = torch.tensor([(r - l) * (b - t) / 160000 for l, t, r, b in boxes])
    ratios = torch.tensor([(r - l) / (b - t) for l, t, r, b in boxes])
    assert areas.min() > 0.07
    assert areas.max() <= 1.0
    assert areas.min() < 0.1
    assert abs(areas[areas < 0.75].mean() - 0.415) < 0.015  # uniform from 0.08 to 0.75; larger ones may not fit
    assert ratios.min() > 0.73
    assert ratios.max() < 1.36
    assert abs(ratios.log().mean()) < 0.02


def test_decoding_lays_transparency_on_white_and_keeps_colours():
    clear = decode(picture((0, 0, 0, 0), mode="RGBA"))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    tensor = to_tensor(decode(picture()), centre_box(24, 16), 8)
    assert tensor.shape == (3, 8, 8)
    assert tensor[:, 3, 3].tolist() == [200, 10, 10]


def wide_grey(value, mode, kind):
    held = io.BytesIO()
    Image.new(mode, (8, 8), value).save(held, kind)
    return held.getvalue()


@pytest.mark.parametrize("mode, kind", [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF")])
def test_sixteen_bits_of_grey_are_not_cut_off_at_white(mode, kind):
    for value, want in [(0, 0), (255, 0), (257 * 100, 100), (65535, 255)]:
        assert decode(wide_grey(value, mode, kind)).getpixel((3, 3)) == (want, want, want)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_skipped_not_guessed(mode):
    assert decode(wide_grey(200, mode, "TIFF")).getpixel((3, 3)) == (200, 200, 200)
    with pytest.raises(RecordError, match="32-bit numbers outside 0 to 255"):
        decode(wide_grey(4000, mode, "TIFF"))


def test_whatever_pillow_raises_of_a_damaged_image_is_a_record_error(monkeypatch):
    monkeypatch.setattr(images, "known_formats", lambda: ("DDS",))
    held = io.BytesIO()
    Image.new("RGBA", (8, 8)).save(held, "DDS")
    data = bytearray(held.getvalue())
    data[80:84] = bytes(4)  # pixel format flags: Pillow raises NotImplementedError
    with pytest.raises(RecordError, match="cannot be decoded"):
        decode(bytes(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA"])
def test_pictures_of_pixels_are_read(kind):
    assert decode(picture(kind=kind)).size == (24, 16)


@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_as_the_camera_says(orientation):
    image = Image.new("RGB", (24, 16), "black")
    image.paste("white", (0, 0, 12, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    held = io.BytesIO()
    image.save(held, "PNG", exif=exif)
    want = ImageOps.exif_transpose(Image.open(io.BytesIO(held.getvalue())))
    got = decode(held.getvalue())
    assert got.size == want.size == ((16, 24) if orientation in (5, 6, 7, 8) else (24, 16))
    assert got.tobytes() == want.tobytes()


def test_a_damaged_tag_costs_no_picture(monkeypatch):
    def broken(self):
        raise ValueError("damaged")

    monkeypatch.setattr(Image.Image, "getexif", broken)
    assert decode(picture(kind="BMP")).size == (24, 16)


def test_a_format_that_starts_another_program_is_not_read():
    """EPS is a program. Pillow would run it with Ghostscript."""
    with pytest.raises(RecordError, match="unknown format"):
        decode(picture(kind="EPS"))


@pytest.mark.parametrize("data", [b"", b"not an image", picture()[:40], picture(kind="JPEG")[:200]])
def test_damaged_images_are_record_errors(data):
    with pytest.raises(RecordError, match="cannot be decoded"):
        decode(data)


def test_a_batch_that_leaves_a_rank_without_a_pair_is_refused():
    assert len(stream(Numbers(8, 8), 2, rank=1, world=2).order.take(Position(), 2)[0]) == 2
    with pytest.raises(ConfigError, match=r"batch_size counts the pairs of all ranks.* at least 3, got 2"):
        stream(Numbers(8, 8), 2, rank=0, world=3)


# -- icons ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_icons():
    icons = load_icons()
    return icons.select(range(0, len(icons), len(icons) // 64))


def test_icon_batches_do_not_depend_on_ranks(some_icons):
    alone = stream(IconSource(some_icons, True), 32).make(Position(), 5)
    parts = [stream(IconSource(some_icons, True), 32, rank=r, world=3).make(Position(), 5) for r in range(3)]
    assert torch.equal(torch.cat([p.images for p in parts]), alone.images)
    assert torch.equal(torch.cat([p.ids for p in parts]), alone.ids)
    assert torch.equal(torch.cat([p.tokens["ids"] for p in parts]), alone.tokens["ids"])
    other = stream(IconSource(some_icons, True), 32).make(Position(), 6)
    assert not torch.equal(other.images, alone.images)  # another step has other rotations


def test_augmentation_moves_but_does_not_destroy(some_icons):
    images = some_icons.images.unsqueeze(1)
    still = augment_icons(images, torch.full((len(images), 8), 0.5))
    assert (still.int() - images.int()).abs().max() <= 1
    moved = augment_icons(images, torch.rand(len(images), 8, generator=torch.Generator().manual_seed(0)))
    assert moved.shape == images.shape
    ink, before = (255 - moved.float()).mean((1, 2, 3)), (255 - images.float()).mean((1, 2, 3))
    assert ((ink / before) > 0.3).all()
    assert not torch.equal(moved, images)


def test_plain_icons_keep_their_captions(some_icons):
    rows = IconSource(some_icons, False).rows(torch.tensor([3, 1]), Draw(0, 0, 0, 0, 2), SkipLog())
    assert rows.texts == [some_icons.captions[3], some_icons.captions[1]]
    assert torch.equal(rows.images[:, 0], some_icons.images[[3, 1]])


# -- threads -------------------------------------------------------------------------------------------------


def test_a_run_that_stops_does_not_decode_another_batch_first(tmp_path, monkeypatch):
    for i in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    source = open_source(DataConfig(source="folder", path=str(tmp_path), eval_share=0), 8, SkipLog())
    read, seen, second = source.read, [], threading.Event()

    def slowly(key):
        seen.append(key)
        if len(seen) > 20:
            second.set()
            time.sleep(0.1)
        return read(key)

    monkeypatch.setattr(source, "read", slowly)
    batches = stream(source, 20, prefetch=1).batches(Position(), 0, 9)
    next(batches)
    assert second.wait(600)
    batches.close()
    assert len(seen) < 35, "the second batch was made to its end"
    assert not [thread for thread in threading.enumerate() if thread.name == "tilewise-batches"]


def test_a_thread_that_fails_hands_its_error_over(some_icons):
    source = IconSource(some_icons, False)
    source.rows = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        list(stream(source, 8, prefetch=1).batches(Position(), 0, 3))
