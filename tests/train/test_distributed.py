"""The device of a rank, and numbers of ranks that do not fit the machine."""

import socket

import pytest
import torch
from tests.processes import free_port

from tilewise.errors import ConfigError, GroupError
from tilewise.train import distributed, loop
from tilewise.train.config import load_config
from tilewise.train.distributed import choose_device, join_world
from tilewise.train.loop import train


class Joined(Exception):
    """The process group would be made now."""


@pytest.fixture
def two_gpus(monkeypatch):
    def join(backend):
        raise Joined(backend)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)


def set_ranks(monkeypatch, rank, local_size, size=None):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", local_size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WORLD_SIZE", str(size or local_size))


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize("rank", range(4))
def test_every_rank_refuses_more_ranks_than_gpus(two_gpus, monkeypatch, name, rank):
    """Those with a GPU, too: they would wait for the others."""
    set_ranks(monkeypatch, rank, 4)
    with pytest.raises(ConfigError) as caught:
        join_world(name)
    assert str(caught.value).startswith("4 ranks on this machine need 4 GPUs, one for each, and torch sees 2. ")
    for advice in ("--nproc-per-node 2", "loop.device=cpu", "CUDA_VISIBLE_DEVICES"):
        assert advice in str(caught.value)


def test_the_trainer_refuses_them_before_it_reads_data(two_gpus, monkeypatch, tmp_path):
    set_ranks(monkeypatch, 3, 4)
    with pytest.raises(ConfigError, match="4 ranks on this machine need 4 GPUs"):
        train(load_config(None, [f"output.folder={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_does_not_say_how_many_ranks_a_machine_has(two_gpus, monkeypatch):
    set_ranks(monkeypatch, 2, 3)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match="3 ranks on this machine need 3 GPUs"):
        join_world("auto")


@pytest.mark.parametrize(
    "name, rank, local_size, size, backend",
    [("auto", 1, 2, 2, "nccl"), ("auto", 0, 2, 8, "nccl"), ("cuda", 1, 2, 4, "nccl"), ("cpu", 3, 4, 4, "gloo")],
)
def test_as_many_ranks_as_gpus_join(two_gpus, monkeypatch, name, rank, local_size, size, backend):
    """Over several machines, the number of all ranks may be larger."""
    set_ranks(monkeypatch, rank, local_size, size)
    with pytest.raises(Joined, match=backend):
        join_world(name)


def test_each_rank_has_its_own_device(two_gpus):
    assert [choose_device("auto", rank, 2) for rank in range(2)] == [torch.device("cuda", rank) for rank in range(2)]
    assert choose_device("cpu", 5, 6) == torch.device("cpu")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["x", "", "-1", "1.5", "9" * 5000, "\u00b2"])
def test_an_environment_without_numbers_is_refused(two_gpus, monkeypatch, name, value):
    set_ranks(monkeypatch, 0, 2)
    monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=rf"the environment has {name}="):
        join_world("auto")


def test_a_first_rank_that_nobody_can_reach_is_named(monkeypatch):
    """Torch alone waits for half an hour, and no signal ends it."""
    set_ranks(monkeypatch, 1, 2)
    port = str(free_port())
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    said = rf"of 2 ranks: nothing has answered at 127\.0\.0\.1:{port} .*Start rank 0 there"
    with pytest.raises(GroupError, match=said):
        distributed._wait_for_first_rank(2, 0.5)
    with socket.create_server(("127.0.0.1", int(port))):
        distributed._wait_for_first_rank(2)

    def refuse(size):
        raise Joined(f"waits for rank 0 of {size}")

    monkeypatch.setattr(distributed, "_wait_for_first_rank", refuse)
    with pytest.raises(Joined, match="waits for rank 0 of 2"):
        join_world("cpu")


@pytest.mark.parametrize("name, value", [("MASTER_ADDR", None), ("MASTER_PORT", None), ("MASTER_PORT", "x")])
def test_a_rendezvous_that_is_not_described_is_one_sentence(monkeypatch, name, value):
    set_ranks(monkeypatch, 1, 2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=r"cannot join the process group of 2 ranks: .*\. Start with torchrun"):
        join_world("cpu")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_there_is_at_least_one_rank(two_gpus, monkeypatch, name):
    set_ranks(monkeypatch, 0, 2)
    monkeypatch.setenv(name, "0")
    with pytest.raises(GroupError, match=rf"the environment has {name}='0'"):
        join_world("auto")


@pytest.mark.parametrize("transport", ["[gloo/transport/tcp/pair.cc:537] Connection reset by peer", None])
def test_a_lost_rank_in_the_ring_is_the_sentence_of_the_trainer(monkeypatch, transport):
    """The ring raises a `GroupError` of its own. Ranks that disagree have one, too, which stays as it is."""

    def fail(*args):
        cause = None if transport is None else RuntimeError(transport)
        raise GroupError("rank 1 of 2 could not send a block") from cause

    monkeypatch.setattr(loop, "join_world", lambda device: distributed.World(1, 2, torch.device("cpu"), "a group"))
    monkeypatch.setattr(loop, "_train", fail)
    said = "could not send a block" if transport is None else "rank 1 stops, because another rank has ended"
    with pytest.raises(GroupError, match=said):
        train(load_config(None, []))
