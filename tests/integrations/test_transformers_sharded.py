"""Models of transformers whose head is sharded: by their tp_plan, by FSDP2 through accelerate and TRL, by DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close
from tests.integrations.tiny_models import SMALL, V
from tests.processes import run_ranks
from tests.ring.wrapped import Allocated
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tilewise.integrations.transformers import use_linear_cross_entropy

pytest.importorskip("transformers")
TOKENS = 4, 33  # so many that their logits are larger than the weight


def start(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    # transformers and accelerate read these.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(V, TOKENS, generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value.grad) for name, value in model.named_parameters()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save_llama(folder: str, *, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | {"tie_word_embeddings": tied})).double().save_pretrained(folder)


def rank_of_a_tp_plan(rank: int, folder: str) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    start(rank, os.path.join(folder, "store"))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        for tied in (False, True):
            saved = os.path.join(folder, f"llama-{tied}")
            alone = LlamaForCausalLM.from_pretrained(saved, dtype=torch.float64).train()
            model = LlamaForCausalLM.from_pretrained(
                saved, dtype=torch.float64, distributed_config=DistributedConfig(tp_plan="auto"), device_mesh=mesh
            )
            model.train()
            dense = model(**batch()).loss.detach()  # transformers computes it in float32
            handles = [use_linear_cross_entropy(each, statistics=True) for each in (alone, model)]
            alone(**batch()).loss.backward()
            with Allocated() as seen:
                output = model(**batch())
                output.loss.backward()
            # Of the logits of the checked tokens, and of the gathered logits of all, there is none.
            assert seen.largest < TOKENS[0] * (TOKENS[1] - 1) * V * 4
            assert type(output.loss) is Tensor
            assert_close(output.loss, dense, 1e-5, f"{tied}, loss")
            assert_close(output.loss, alone(**batch()).loss, 1e-12, f"{tied}, loss alone")
            for name, value in vars(handles[0].token_stats).items():
                if value is not None:
                    assert_close(getattr(handles[1].token_stats, name).double(), value.double(), 1e-12, name)
            want = gradients(alone)
            for name, got in gradients(model).items():
                assert_close(got, want[name], 1e-11, f"{tied}, {name}")
            forward = model.lm_head.forward
            assert forward.__module__.endswith("tensor_parallel")  # as before the call
            handles[1].remove()
            with torch.no_grad():
                assert_close(model.eval()(**batch()).loss, dense, 1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.group
def test_a_tp_plan_keeps_the_head_sharded(tmp_path):
    for tied in (False, True):
        save_llama(str(tmp_path / f"llama-{tied}"), tied=tied)
    run_ranks(rank_of_a_tp_plan, (str(tmp_path),), 2)


# FSDP2 through accelerate and TRL. By default, accelerate makes a unit of [norm, head], or [norm, embedding, head].

LAYERS = ["LlamaDecoderLayer"]
LAYOUTS = {"[norm, head]": LAYERS, "the head alone": [*LAYERS, "Linear"]}


def trained(kind: str, folder: str, per_rank: int, wrap: list[str], *, ours: bool, tied: bool) -> list[Any]:
    """The logs of two steps, the weights after them, and the unit of the head."""
    import datasets
    import trl
    from tests.integrations.test_trl import SETTINGS, numbers, rows, tokenizer
    from torch.distributed.fsdp import FSDPModule
    from transformers import LlamaConfig, LlamaForCausalLM

    from tilewise.integrations.trl import use_token_head

    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | {"tie_word_embeddings": tied})
    others: dict[str, Any] = {"ref_model": LlamaForCausalLM(config)} if kind == "DPO" else {}
    model = LlamaForCausalLM(config)
    plain = {"max_steps": 2, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1, "seed": 3}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    sharded = {"version": 2, "transformer_layer_cls_to_wrap": wrap, "reshard_after_forward": True}
    fsdp = {"fsdp": True, "fsdp_config": sharded} if wrap else {}
    how = {"per_device_train_batch_size": per_rank, "use_cpu": True, "bf16": False, **SETTINGS[kind]}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(output_dir=folder, **plain, **quiet, **how, **fsdp),
        train_dataset=datasets.Dataset.from_list(rows(kind)),
        processing_class=tokenizer(),
        **others,
    )
    if ours:
        use_token_head(trainer)
    trainer.train()
    logs = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: whole(value).detach().clone() for name, value in trainer.model.named_parameters()}
    return [logs, weights, isinstance(trainer.model.lm_head, FSDPModule)]


def rank_of_a_trainer(rank: int, folder: str, kind: str, tied: bool, results: str) -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    plain = PartialState.__init__

    def initialize(self: Any, *args: Any, **more: Any) -> None:
        """Accelerate has FSDP on GPUs and the like only. On gloo and the CPU the same code runs."""
        plain(self, *args, **more)
        self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialize
    start(rank, os.path.join(folder, "store"))
    try:
        for name, wrap in LAYOUTS.items():
            found = trained(kind, os.path.join(folder, f"{rank}"), 2, wrap, ours=True, tied=tied)
            if rank == 0:
                torch.save(found, os.path.join(results, f"{name}.pt"))
    finally:
        dist.destroy_process_group()


@pytest.mark.group
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of other packages
@pytest.mark.parametrize(("kind", "tied"), [("SFT", False), ("SFT", True), ("DPO", False)])
def test_trl_trainers_with_a_sharded_head(kind, tied, tmp_path):
    """Two ranks with half of the batch each have the logs and the weights of one process with all of it."""
    for package in ("trl", "datasets", "accelerate"):
        pytest.importorskip(package)
    logs, weights, _ = trained(kind, str(tmp_path), 4, [], ours=False, tied=tied)
    run_ranks(rank_of_a_trainer, (str(tmp_path), kind, tied, str(tmp_path)), 2)
    for name in LAYOUTS:
        got, ours, _ = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert len(got) == 2
        for one, other in zip(got, logs, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        for which, value in weights.items():
            assert_close(ours[which], value, 1e-6, f"{name}, {which}")
