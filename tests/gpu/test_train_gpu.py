"""The trainer on a CUDA device: precisions, offload, measured memory, and the demo's settings, all in small."""

import pytest
import torch
from tests.train.small_icons import write_small_icons

from tilewise.train.config import load_config
from tilewise.train.demo import demo_config
from tilewise.train.loop import Trainer, train
from tilewise.train.run_folder import RunFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SMALL = [
    "model.width=64", "model.depth=1", "model.text_buckets=512", "model.embed_dim=32", "loop.batch_size=128",
    "loop.chunk_size=48", "loop.steps=12", "loop.device=cuda", "optim.lr=3e-3", "output.report=false",
    "output.tensorboard=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return write_small_icons(tmp_path_factory.mktemp("icons") / "small.zip")


def run(folder, icons, *overrides):
    assert train(load_config(None, [*SMALL, f"output.folder={folder}", f"data.path={icons}", *overrides])).finished
    return [line for line in RunFolder(folder).read_metrics() if line["kind"] == "train"]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("offload", ["false", "true"])
def test_precisions_and_offload_learn(tmp_path, icons, precision, offload):
    lines = run(tmp_path, icons, f"loop.precision={precision}", f"loss.offload={offload}")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05


def test_offload_and_cpu_change_nothing(tmp_path, icons):
    want = run(tmp_path / "cpu", icons, "loop.device=cpu")
    for name, extra in (("plain", []), ("offload", ["loss.offload=true"]), ("dense", ["loss.name=dense"])):
        got = run(tmp_path / name, icons, *extra)
        for a, b in zip(got, want, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)


def test_memory_is_measured_and_offload_takes_the_data_off_the_device(tmp_path, icons):
    found = {}
    for offload in ("false", "true"):
        settings = [*SMALL, f"output.folder={tmp_path / offload}", f"data.path={icons}", f"loss.offload={offload}"]
        trainer = Trainer(load_config(None, settings), _alone())
        trainer.run()
        found[offload] = trainer.state.memory
    assert all(memory.measured and memory.loss > 0 and memory.backbone > 0 for memory in found.values())
    assert found["false"].data > 0 == found["true"].data


def _alone():
    from tilewise.train.distributed import World

    return World(0, 1, torch.device("cuda", 0))


def test_a_stopped_run_continues(tmp_path, icons):
    settings = [*SMALL, f"output.folder={tmp_path}", f"data.path={icons}", "output.checkpoint_every=4"]
    trainer = Trainer(load_config(None, settings), _alone())
    trainer.steps = 12
    original = trainer._after_step

    def die(log, bar, stopping):
        original(log, bar, stopping)
        if trainer.step == 6:
            raise KeyboardInterrupt

    trainer._after_step = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    lines = run(tmp_path, icons, "output.checkpoint_every=4")
    assert [line["step"] for line in lines] == list(range(1, 13))


def test_the_demo_starts_with_its_large_batch(tmp_path):
    config = demo_config([f"output.folder={tmp_path}", "loop.steps=2", "output.report=false"], cuda=True)
    assert train(config).step == 2
