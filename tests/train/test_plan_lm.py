"""The calculator of `tilewise plan lm` against table A3 of the paper, and its errors."""

import pytest
from typer.testing import CliRunner

from tilewise.errors import ConfigError, RangeError
from tilewise.train.cli import app
from tilewise.train.plan_cli import chosen_shapes, parse_count
from tilewise.train.plan_lm import GIB, MIB, MODELS, PAPER_MODELS, Cluster, ModelShape, find_model, plan_lm

# logits, activations and weights + optimizer + gradients in MiB; largest batch before and after; gain.
TABLE_A3 = {
    "GPT 2": (12_564, 1_152, 1_045, 5_866_190, 69_845_595, 11.9),
    "GPT Neo 1.3B": (12_564, 6_144, 10_421, 4_268_047, 12_996_042, 3.0),
    "GPT Neo 2.7B": (12_564, 10_240, 20_740, 3_471_784, 7_731_585, 2.2),
    "Gemma 2B": (64_000, 4_608, 19_121, 1_155_515, 17_204_330, 14.9),
    "Gemma 2 27B": (64_000, 26_496, 207_727, 739_448, 2_525_554, 3.4),
    "Gemma 2 2B": (64_000, 7_488, 19_946, 1_108_206, 10_580_057, 9.5),
    "Llama 2 13B": (8_000, 25_600, 99_303, 2_203_057, 2_891_512, 1.3),
    "Llama 2 7B": (8_000, 16_384, 51_410, 3_164_429, 4_709_560, 1.5),
    "Llama 3 70B": (32_064, 81_920, 538_282, 397_019, 552_414, 1.4),
    "Llama 3 8B": (32_064, 16_384, 61_266, 1_579_333, 4_670_136, 3.0),
    "Mistral 7B": (8_000, 16_384, 55_250, 3_154_108, 4_694_200, 1.5),
    "Mixtral 8x7B": (8_000, 16_384, 356_314, 2_344_949, 3_489_944, 1.5),
    "Phi 1.5": (12_574, 6_144, 10_821, 4_264_482, 12_991_781, 3.0),
    "Phi 3 Medium": (8_003, 25_600, 106_508, 2_188_824, 2_873_067, 1.3),
    "Qwen 1.5 7B": (37_912, 16_384, 58_909, 1_412_087, 4_679_564, 3.3),
}
PAPER = Cluster(gpus=16, memory_bytes=80 * GIB, reserve_bytes=5 * GIB, workspace_bytes=0)


def test_the_table_has_the_papers_rows():
    assert [shape.name for shape in PAPER_MODELS] == list(TABLE_A3)


@pytest.mark.parametrize("name", TABLE_A3)
def test_every_figure_of_table_a3(name):
    plan = plan_lm(find_model(name), PAPER, tokens=65_536)
    logits, activations, model, before, after, gain = TABLE_A3[name]
    assert [plan.logits_bytes / MIB, plan.activations_bytes / MIB, plan.model_bytes / MIB] == pytest.approx(
        [logits, activations, model], abs=0.5
    )
    # The paper rounds to the nearest token, and we round down.
    assert plan.before_tokens in (before - 1, before)
    assert plan.after_tokens in (after - 1, after)
    assert plan.gain == pytest.approx(gain, abs=0.051)


def test_the_workspace_is_paid_once_a_device_and_not_for_each_token():
    shape = find_model("llama 3 8b")
    free, paid = plan_lm(shape, PAPER), plan_lm(shape, Cluster(workspace_bytes=256 * MIB))
    assert paid.before_tokens == free.before_tokens
    per_token = 2 * 4096 * 32
    assert free.after_tokens - paid.after_tokens == 16 * 256 * MIB // per_token


def test_a_batch_of_the_largest_size_fits_and_one_token_more_does_not():
    shape, cluster = find_model("gemma 3 1b"), Cluster(gpus=3, memory_bytes=24 * GIB)
    plan = plan_lm(shape, cluster)
    room = cluster.gpus * cluster.usable_bytes

    def needed(tokens, logits):
        at = plan_lm(shape, cluster, tokens)
        workspace = 0 if logits else cluster.gpus * cluster.workspace_bytes
        return at.model_bytes + at.activations_bytes + workspace + (at.logits_bytes if logits else 0)

    for tokens, logits in ((plan.before_tokens, True), (plan.after_tokens, False)):
        assert needed(tokens, logits) <= room < needed(tokens + 1, logits)


def test_the_command_prints_the_papers_row():
    result = CliRunner().invoke(app, ["plan", "lm", "gemma-2-2b", "--workspace-mib", "0", "--sequence-length", "8192"])
    assert result.exit_code == 0, result.output
    for figure in ("64,000", "7,488", "19,946", "1,108,206", "10,580,056", "9.5 x", "128 seq.", "1,280 seq."):
        assert figure in result.output


def test_the_command_lists_all_models_and_says_which_do_not_fit():
    result = CliRunner().invoke(app, ["plan", "lm", "--gpus", "1"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in MODELS)
    assert "left out: Llama 3 70B takes 525.7 GiB" in result.output


def test_a_model_is_described_by_its_sizes():
    sizes = {"vocabulary": 100_000, "hidden": 512, "layers": 8}
    assert chosen_shapes("", sizes, "0.1B") == [ModelShape(name="this model", parameters=100_000_000, **sizes)]
    (changed,) = chosen_shapes("llama 3 8b", {"vocabulary": 256_000, "hidden": 0, "layers": 0}, "")
    assert (changed.vocabulary, changed.hidden) == (256_000, 4096)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--tokens", "0"),
        ("--memory", "nan"),
        ("--memory", "80 bananas"),
        ("--memory", "-1GiB"),
        ("--reserve-gib", "inf"),
    ],
)
def test_the_command_refuses_what_no_model_can_have(wrong):
    result = CliRunner().invoke(app, ["plan", "lm", *wrong])
    assert isinstance(result.exception, RangeError)
    assert wrong[0] in str(result.exception)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: find_model("lama 3 8b"), ConfigError, "Did you mean Llama 3 8B"),
        (lambda: find_model("zzz"), ConfigError, "--vocab, --hidden, --layers and --parameters"),
        (
            lambda: chosen_shapes("", {"vocabulary": 9, "hidden": 0, "layers": 0}, "1B"),
            ConfigError,
            "--hidden and --la",
        ),
        (lambda: chosen_shapes("gpt 2", {"vocabulary": -4}, ""), RangeError, "vocabulary is a whole number"),
        (lambda: chosen_shapes("~nosuch/x", {}, ""), ConfigError, "~nosuch/x"),
        (lambda: chosen_shapes("~nosuch/x.json", {}, ""), ConfigError, "there is no file ~nosuch/x.json"),
        (lambda: chosen_shapes("x" * 300, {}, ""), ConfigError, "x" * 300),
        (lambda: chosen_shapes("x" * 300 + ".json", {}, ""), ConfigError, "there is no file x"),
        (lambda: parse_count("many"), RangeError, "8.03B or 137M, got 'many'"),
        (lambda: parse_count("-1B"), RangeError, "positive"),
        (lambda: Cluster(gpus=0), RangeError, "gpus is a whole number, at least 1, got 0"),
        (lambda: Cluster(memory_bytes=4 * GIB), RangeError, "nothing left"),
        (lambda: Cluster(reserve_bytes=-1), RangeError, "at least 0"),
        (lambda: plan_lm(find_model("gpt 2"), tokens=0), RangeError, "tokens is a whole number"),
        (lambda: plan_lm(find_model("llama 3 70b"), Cluster(gpus=4)), RangeError, "Take at least 8 GPUs"),
    ],
)
def test_errors_say_what_to_do(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_the_named_number_of_gpus_is_enough():
    assert plan_lm(find_model("llama 3 70b"), Cluster(gpus=8)).before_tokens > 0
