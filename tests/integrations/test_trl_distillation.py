"""TRL's distillation trainer logs the same losses and metrics with our divergence as with its own, in float32."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.integrations.model_families import made
from tests.integrations.test_trl import numbers, rows, tokenizer

from tilewise.errors import ConfigError
from tilewise.integrations.trl import Divergence, use_divergence_head
from tilewise.options import TileOptions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
STEPS = 3


def built(folder, beta: float, temperature: float = 0.8, student: str = "llama", teacher: str = "qwen3", **more):
    trl = pytest.importorskip("trl", minversion="1.16")
    datasets = pytest.importorskip("datasets")
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd"}
    quiet = {"report_to": [], "save_strategy": "no", "dataloader_pin_memory": False, "logging_steps": 1}
    arguments = trl.DistillationConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        seed=3,
        max_completion_length=6,
        beta=beta,
        temperature=temperature,
        **settings | quiet | more,
    )
    data = datasets.Dataset.from_list(rows("GRPO"))
    return trl.DistillationTrainer(
        model=made(student),
        teacher_model=made(teacher, seed=5),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
    )


def run(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        torch.manual_seed(1)
        trainer.train()
        trainer.evaluate()
    logs = [numbers(entry) for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    return logs, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def trained(folder, ours: bool, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = built(folder, **settings)
    if not ours:
        return run(trainer)
    module, calls = sys.modules["trl.trainer.distillation_trainer"], []
    theirs = module.ChunkedDivergenceFunction
    apply = Divergence.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Divergence, "apply", lambda *given: calls.append(1) or apply(*given))
        handle = use_divergence_head(trainer, options=TileOptions(workspace_mib=64))
        assert "active" in repr(handle)
        found = run(trainer)
    assert len(calls) > STEPS + 1, "one comparison, and a call for each step and each batch of the evaluation"
    assert module.ChunkedDivergenceFunction is theirs
    return found


CASES = [
    {"beta": 0.0},
    {"beta": 0.5},
    {"beta": 1.0},
    {"beta": 0.3, "temperature": 1.7, "student": "phi, head with a bias", "teacher": "gemma2, capped"},
    {"beta": 1.0, "student": "gemma2, capped", "teacher": "granite, divided"},
    {"beta": 0.0, "student": "cohere, scaled", "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("settings", CASES, ids=lambda case: ", ".join(f"{k} {v}" for k, v in case.items()))
def test_the_trainer_logs_the_same(settings, tmp_path):
    want, weights = trained(tmp_path, False, **settings)
    got, ours = trained(tmp_path, True, **settings)
    assert len(got) == STEPS + 1
    assert {"loss", "entropy", "grad_norm"} <= got[0].keys()
    assert got[0]["loss"] > 0.1
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert_close(ours, weights, 1e-5, "weights after training")


def test_only_this_trainer_is_changed_and_remove_restores_it(tmp_path):
    first, other = built(tmp_path, 0.5), built(tmp_path, 0.5)
    with use_divergence_head(first) as handle:
        assert isinstance(first._compute_loss, Divergence)
        assert "_compute_loss" not in vars(other)
        with pytest.raises(ConfigError, match="already active"):
            use_divergence_head(first)
    assert "removed" in repr(handle)
    assert "_compute_loss" not in vars(first)
    handle.remove()
    use_divergence_head(first)


def functions():
    """Our function, and TRL's."""
    from trl.trainer.distillation_trainer import ChunkedDivergenceFunction

    trainer = SimpleNamespace(_compute_loss=None)
    return Divergence(trainer, sys, TileOptions()).apply, ChunkedDivergenceFunction.apply


def test_remove_gives_back_what_others_have_put_there(monkeypatch):
    monkeypatch.setattr("tilewise.integrations.trl._module_of", lambda trainer: SimpleNamespace())
    trainer = SimpleNamespace(_compute_loss=lambda: "patched before")
    before = trainer._compute_loss
    ours = Divergence(trainer, SimpleNamespace(), TileOptions())
    trainer._compute_loss = ours
    ours.remove()
    assert trainer._compute_loss is before
    ours = Divergence(trainer, SimpleNamespace(), TileOptions())
    trainer._compute_loss = wrapped = lambda: ours()
    ours.remove()
    assert trainer._compute_loss is wrapped
    assert trainer._compute_loss() == "patched before", "what is removed does nothing, even if it is still called"
    assert "removed" in repr(ours)


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_models_of_different_types_and_a_padded_teacher(beta, types):
    pytest.importorskip("trl", minversion="1.16")
    draw = torch.Generator().manual_seed(0)
    sizes = ((9, 8), (40, 8), (40,), (9, 6), (43, 6), (43,))
    tensors = [torch.randn(size, generator=draw).to(types[i // 3]) for i, size in enumerate(sizes)]
    grads = []
    for compute in functions():
        student = [value.clone().requires_grad_() for value in tensors[:3]]
        divergence, entropy = compute(*student, *tensors[3:], beta, 0.9)
        assert not entropy.requires_grad
        weights = torch.linspace(-1, 1, 9)
        got = torch.autograd.grad(divergence @ weights, student)
        assert [grad.dtype for grad in got] == [types[0]] * 3
        grads.append((divergence, entropy, *got))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs, 1e-5 if ours.dtype == torch.float32 else 1e-2)


def test_no_tokens():
    pytest.importorskip("trl", minversion="1.16")
    ours, _ = functions()
    x, w = torch.empty(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        divergence, entropy = ours(x, w, None, x.detach(), w.detach(), None, beta)
        assert divergence.shape == entropy.shape == (0,)
        divergence.sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_other_trainers_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.server_distillation import ServerDistillationTrainer
    from trl.trainer import distillation_trainer as module

    for other in (object(), SimpleNamespace(beta=0.5), object.__new__(ServerDistillationTrainer)):
        with pytest.raises(ConfigError, match=r"trainer is a DistillationTrainer of TRL 1\.16, which"):
            use_divergence_head(other)

    class Older(torch.autograd.Function):
        @staticmethod
        def forward(ctx, student_hidden, student_weight):
            return student_hidden

    class Other(module.ChunkedDivergenceFunction):
        @classmethod
        def apply(cls, *given):
            divergence, entropy = module.ChunkedDivergenceFunction.__mro__[1].apply(*given)
            return 2 * divergence, entropy

    trainer = built(tmp_path, 0.5)
    monkeypatch.setattr(module, "ChunkedDivergenceFunction", Older)
    with pytest.raises(ConfigError, match=r"this version takes \(student_hidden, student_weight\)"):
        use_divergence_head(trainer)
    monkeypatch.setattr(module, "ChunkedDivergenceFunction", Other)
    with pytest.raises(ConfigError, match="the divergence of this TRL differs"):
        use_divergence_head(trainer)


def test_sharded_heads_of_deepspeed_are_refused():
    apply = Divergence(SimpleNamespace(_compute_loss=None), sys, TileOptions()).apply
    x, w = torch.randn(3, 4), torch.nn.Parameter(torch.empty(0))
    w.ds_id = 1
    with pytest.raises(ConfigError, match="ZeRO-3"):
        apply(x, w, None, x, torch.randn(7, 4), None, 0.5)
