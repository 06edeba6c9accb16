"""Every method of a benchmark case computes the same loss and the same gradients."""

import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.compare import relative_error

from benchmarks import cases, peers

CPU = torch.device("cpu")
OURS = {"tilewise", "tilewise-filter", "tilewise-backward", "tilewise-forward", "dense", "compile", "clip_loss"}
SMALL = {
    loss: cases.Case(loss=loss, rows=96, cols=96, width=32, dtype="float32", methods=("tilewise", "dense"))
    for loss in ("clip", "siglip", "nt_xent", "cross_entropy", "retrieval")
}
SMALL["cross_entropy"] = replace(SMALL["cross_entropy"], cols=300)
SMALL["peaked"] = replace(SMALL["cross_entropy"], scores="peaked")


def loss_and_gradients(case, method, inputs):
    step = cases.build_step(case, method, inputs)
    return [step(), *(leaf.grad.clone() for leaf in step.leaves)]


NATIVE = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")


@pytest.mark.parametrize(
    "name, method",
    [
        *((name, "tilewise") for name in SMALL),
        *(pytest.param(name, "torch-native", marks=NATIVE) for name in ("cross_entropy", "peaked")),
    ],
)
def test_methods_agree(name, method):
    case = SMALL[name]
    inputs = cases.make_inputs(case, CPU)
    got = loss_and_gradients(case, method, inputs)
    want = loss_and_gradients(case, "dense", inputs)
    assert len(got) == len(want) == 1 + len(cases.leaves_of(case, inputs))
    for mine, dense in zip(got, want, strict=True):
        assert relative_error(mine, dense) < 1e-5


def dense_clip(q, k, scale):
    return F.cross_entropy(scale * q @ k.T, torch.arange(len(q)), reduction="none")


def stand_ins():
    """Stand-ins for the peers that need a GPU, with their signatures and their documented mathematics."""

    class MemoryEfficientCLIPLoss:
        def __init__(self, temperature=0.07, normalized_inputs=False, stable=True):
            assert normalized_inputs
            assert not stable
            self.scale = 1 / temperature

        def __call__(self, image_features, text_features):
            both = [(image_features, text_features), (text_features, image_features)]
            return sum(dense_clip(*pair, self.scale).mean() for pair in both) / 2

    class LigerFusedLinearCrossEntropyLoss:
        def __call__(self, lin_weight, _input, target):
            return F.cross_entropy(_input @ lin_weight.T, target)

    def fused_siglip_loss(img_features, txt_features, log_temperature, bias):
        logits = log_temperature.exp() * img_features @ txt_features.T + bias
        return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)

    def linear_cross_entropy(e, c, targets, filter_eps="high"):
        return F.cross_entropy(e @ c.T, targets)

    def cal_flash_loss(q, k, labels=None, scale=None, head_dim=256):
        return dense_clip(q, k, scale)

    liger = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerFusedLinearCrossEntropyLoss)
    return {
        "inf_cl": types.SimpleNamespace(cal_flash_loss=cal_flash_loss),
        "memeff": types.SimpleNamespace(MemoryEfficientCLIPLoss=MemoryEfficientCLIPLoss),
        "siglip_kernel": types.SimpleNamespace(fused_siglip_loss=fused_siglip_loss),
        "cut_cross_entropy": types.SimpleNamespace(linear_cross_entropy=linear_cross_entropy),
        peers.LIGER: liger,
    }


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name != "torch-native"])
def test_adapters_pass_the_arguments_that_the_peers_take(name, monkeypatch):
    monkeypatch.setattr(peers.importlib, "import_module", stand_ins().__getitem__)
    case = SMALL[peers.PEERS[name].loss]
    inputs = cases.make_inputs(case, CPU)
    step = cases.build_step(case, name, inputs)
    got = [step(), inputs["a"].grad, inputs["b"].grad]
    dense = loss_and_gradients(case, "dense", inputs)
    for mine, want in zip(got, dense, strict=False):
        assert relative_error(mine, want) < 1e-5


def test_an_absent_peer_says_so(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", missing)
    with pytest.raises(peers.PeerAbsent, match="No module named 'inf_cl'"):
        cases.build_step(SMALL["clip"], "inf_cl", cases.make_inputs(SMALL["clip"], CPU))


@pytest.mark.parametrize("suite", cases.SUITES)
def test_suites_name_what_exists(suite):
    chosen = cases.SUITES[suite]()
    names = [case.name for case in chosen]
    assert len(names) == len(set(names))
    for case in chosen:
        assert case.methods[0] == "tilewise"
        assert case.baseline in case.methods
        for method in case.methods:
            assert method in OURS or peers.PEERS[method].loss == case.loss, (case.name, method)


def test_peaked_scores_are_peaked_and_flat_ones_flat():
    for scores, share in (("flat", 1.0), ("peaked", 0.1)):
        case = replace(SMALL["cross_entropy"], rows=200, cols=4000, scores=scores)
        inputs = cases.make_inputs(case, CPU)
        probability = (inputs["a"] @ inputs["b"].T).softmax(1)
        above = (probability > 0.1 / 4000).float().mean().item()
        assert above >= 0.95 if scores == "flat" else above <= share
        assert inputs["target"].min() >= 0
        assert inputs["target"].max() < 4000


def test_operations_of_a_case():
    assert SMALL["clip"].flops == 4 * 2 * 96 * 96 * 32
    assert SMALL["retrieval"].flops == 2 * 96 * 96 * 32
    assert SMALL["peaked"].name == "cross_entropy-96-32-300-float32-peaked"
