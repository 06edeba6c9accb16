"""The peers whose tests `tools/peers.py` runs: where the tests are, and why some of them fail."""

from __future__ import annotations

from dataclasses import dataclass, field

ON_CPU = (
    ('device="cuda"', 'device="cpu"'),
    ("skipif(not torch.cuda.is_available()", "skipif(False"),
    ("torch.bfloat16 and not torch.cuda.is_available()", "False"),
    ("torch.cuda.manual_seed", "torch.manual_seed"),
)
# scikit-learn and what it needs; numpy is installed already.
SKLEARN = ("scikit-learn", "scipy", "joblib", "threadpoolctl", "tqdm", "cloudpickle", "narwhals")

OPEN_CLIP = "89fb801f1e6087880e951fc8354b8a2077b79c6d"

# TRL's tests of July 2026, the newest copy that was at hand. They run with the installed TRL, which has a fused head.
TRL = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
TRAINING = "(test_train or test_evaluate) and not vlm and not vllm and not liger"
TRAINERS = (
    ("token_head", ("tests/test_utils.py::TestChunkedLogProbFunction",), ""),
    ("sft", ("tests/test_sft_trainer.py",), f"{TRAINING} or TestChunkedCrossEntropyLoss"),
    *((kind, (f"tests/test_{kind}_trainer.py",), TRAINING) for kind in ("dpo", "kto", "grpo", "rloo")),
    ("distillation", ("tests/experimental/test_distillation_trainer.py",), ""),
)


@dataclass(frozen=True)
class Peer:
    """Where a peer's tests are, and how they are run."""

    name: str  # of the adapter and of the folder below --sources, unless `adapter` is given
    source: str
    commit: str  # "": the installed package
    tests: tuple[str, ...] = ()  # files, or file::class
    ours: str = ""  # a test of this project that drives the peer's code with both losses, instead of `tests`
    adapter: str = ""
    select: str = ""  # only tests whose names match this expression of pytest
    content: tuple[str, ...] = ()  # files and folders that the tests need, beside themselves
    substitutions: tuple[tuple[str, str], ...] = ()
    on_cpu: tuple[tuple[str, str], ...] = ()  # further substitutions
    packages: tuple[str, ...] = ()
    has_own: bool = False  # its own losses are there too: failures are repeated with them
    not_run: dict[str, str] = field(default_factory=dict)  # pattern of a message -> what the test needs
    reasons: dict[str, str] = field(default_factory=dict)  # pattern of "name: message" -> why a test fails
    left_out: dict[str, str] = field(default_factory=dict)  # tests of the same loss that are not run, and why

    @property
    def place(self) -> str:
        """The name of the adapter and of the clone's folder."""
        return self.adapter or self.name


PEERS = [
    Peer(
        name="cut_cross_entropy",
        source="https://github.com/apple/ml-cross-entropy",
        commit="d42911f9b1a1f98289bb601c35c8151562603d74",
        tests=(
            "tests/test_cce_loss_forward.py",
            "tests/test_cce_loss_backward.py",
            "tests/test_cce_lse.py",
            "tests/test_compute_z_loss.py",
            "tests/test_vocab_parallel.py",
        ),
        content=("cut_cross_entropy",),
        on_cpu=ON_CPU,
        # The implementation has no meaning here: each would repeat the same call.
        substitutions=(
            ('["cce", "torch_compile"]', '["cce"]'),
            ('["cce", "torch_compile", "cce_exact"]', '["cce"]'),
            ('["torch_compile", "cce_exact"]', '["cce_exact"]'),
        ),
        left_out={"tests/test_cce_indexed_dot.py": "tests a kernel of the peer; no function here corresponds to it"},
    ),
    Peer(
        name="liger_kernel",
        source="https://github.com/linkedin/Liger-Kernel",
        commit="ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        tests=(
            "test/transformers/test_fused_linear_cross_entropy.py",
            "test/transformers/test_fused_linear_jsd.py",
            "test/chunked_loss/test_jsd_loss.py",
        ),
        content=(
            *("test/__init__.py", "test/conftest.py", "test/utils.py", "test/chunked_loss/__init__.py"),
            *("test/transformers/test_cross_entropy.py", "test/transformers/test_jsd.py"),
        ),
        on_cpu=(("(8, 128, 1024, 4096)", "(2, 64, 256, 1024)"),),  # bfloat16 takes minutes on a CPU
        reasons={"all_ignored": "the mean over no tokens is NaN, as in PyTorch, and 0 in the peer"},
        left_out={
            "test/transformers/test_cross_entropy.py": "cross entropy of logits that are already stored",
            "test/transformers/test_fused_linear_scaled_cross_entropy.py": "no such loss here",
            "test/transformers/test_jsd.py, test_kl_div.py": "divergences of logits that are already stored",
            "test/chunked_loss, the others": "preference losses: recipes on token statistics here; see TRL's tests",
        },
    ),
    Peer(
        name="open_clip",
        source="https://github.com/mlfoundations/open_clip",
        commit=OPEN_CLIP,
        tests=("tests/test_siglip_chunked_loss.py",),
        reasons={
            r"reference_forward\[True-": "negative_only is private to OpenCLIP's exchange between ranks, and refused"
        },
        left_out={
            "tests/test_loss.py": "tests how the peer gathers features; here they are never gathered",
            "tests/test_factory_task.py": "tests which class the peer's factory returns",
            "DistillClipLoss": "no test of its values; tests of the task around it use a dummy; see open_clip_trainer",
        },
    ),
    Peer(
        name="open_clip_trainer",
        adapter="open_clip",
        source="https://github.com/mlfoundations/open_clip",
        commit=OPEN_CLIP,
        ours="tools/peer_tests/test_open_clip_trainer.py",
        content=("src",),
        packages=("timm", "ftfy", "wcwidth"),
        reasons={
            r"global loss-legacy.*logged train": (
                "the older loop logs the loss of rank 0, the global one in the peer and this rank's share here; "
                "the weights agree"
            ),
        },
        left_out={
            "torchvision": "replaced by a stand-in; it would read images",
            "GenLipLoss": "no loss over pairs",
            "DistillClipLoss, accumulated": "OpenCLIP does not support it",
            "two ranks without gather_with_grad": "the peer drops a part of the gradient; documented",
        },
    ),
    Peer(
        name="transformers",
        source="https://github.com/huggingface/transformers",
        commit="",
        ours="tools/peer_tests/test_families.py",
        reasons={
            r"musicgen.*several output embeddings": "several heads; refused",
            r"prophetnet.*LazyLogitsError": "transposes its logits and takes their log_softmax; refused",
            r"mobilebert.*ConfigError.*did not call": "computes its logits without calling its head; refused",
            r"fsmt.*ConfigError.*the head is a Embedding": "its head is an embedding; refused",
        },
    ),
    Peer(
        name="lightly",
        source="https://github.com/lightly-ai/lightly",
        commit="e8d317fc5a87f4387a85a35e689869039ec249ee",
        tests=("tests/loss/test_ntx_ent_loss.py",),
        packages=("pytest-mock",),
        reasons={
            "neg_temp": "a temperature below 0 is refused",
            r"correlated_embedding\[(True|False)-0\.1-1-": (
                "the test's tolerance is 7e-7, and its scores of 10 are rounded by up to 5e-7 each in float32"
            ),
        },
        left_out={"tests/utils/test_dist__gather__losses.py": "gathers over real ranks; see tests/integrations here"},
    ),
    Peer(
        name="pytorch_metric_learning",
        source="https://github.com/KevinMusgrave/pytorch-metric-learning",
        commit="216a792c22b0154d3d3bf008a7317edc7d677e71",
        tests=(
            "tests/losses/test_arcface_loss.py",
            "tests/losses/test_cosface_loss.py",
            "tests/losses/test_ntxent_loss.py",
            "tests/losses/test_self_supervised_loss.py",
            "tests/losses/test_losses_without_labels.py",
            "tests/losses/test_cross_batch_memory.py",
        ),
        content=("src", "tests"),
        packages=SKLEARN,
        reasons={"LossesWithoutLabels|CrossBatchMemory": "pairs that a miner selects are refused"},
    ),
    Peer(
        name="sentence_transformers",
        source="https://github.com/huggingface/sentence-transformers",
        commit="cad211983f36ce458e9b3360f3e11b29fc54cbd8",
        tests=tuple(
            f"tests/sentence_transformer/losses/test_{name}.py"
            for name in (
                *("gist_embed", "cached_gist_embed", "cmnrl", "gradcache"),
                *("merged_forward", "matryoshka", "adaptive_layer"),
            )
        ),
        content=(
            *("sentence_transformers", "tests/__init__.py", "tests/conftest.py", "tests/utils.py"),
            *("tests/sentence_transformer/losses/__init__.py", "tests/sentence_transformer/losses/utils.py"),
        ),
        packages=(*SKLEARN, "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
        has_own=True,
        reasons={
            "under_autocast": "wants a bfloat16 loss, and ours is float32",
        },
        left_out={"tests/sentence_transformer/test_trainer.py": "trains models that it downloads"},
    ),
    *(
        Peer(
            name=f"trl_{name}",
            adapter="trl",
            source="https://github.com/huggingface/trl",
            commit=TRL,
            tests=tests,
            select=select,
            content=(
                *("scripts", "pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/data"),
                *("tests/testing_utils.py", "tests/testing_constants.py", "tests/experimental/__init__.py"),
            ),
            packages=("pytest-datadir",),
            has_own=True,
            not_run={"couldn't connect": "needs a model from the hub"},
            reasons={
                "backward_bfloat16": "the test's reference rounds logits to bfloat16; ours is closer to float64",
                "reduction_methods": "divergences of single classes are not computed",
            },
            left_out={
                "tests of vision models": "need data sets and models from the hub",
                "tests of collators, data preparation, arguments and generation": "do not use the head",
                "tests/test_utils.py::TestPatchChunkedLMHead, TestPatchChunkedCELMHead": "need a GPU",
            },
        )
        for name, tests, select in TRAINERS
    ),
]
