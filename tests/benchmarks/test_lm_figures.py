"""A small language model is trained for real, by the example and for the figures."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from examples import train_lm
from tests.compare import relative_error

from benchmarks import lm_figures

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "benchmarks"
QUICK = f"--vocabulary 600 --hidden 32 --layers 1 --batch 4 --length 32 --steps 60 --lr 1e-2 --text {TEXT}".split()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A tokenizer of 600 entries, trained once."""
    folder = tmp_path_factory.mktemp("lm")
    train_lm.open_tokenizer(train_lm.read_texts([TEXT], 1.0), 600, folder)
    return folder


def test_the_example_learns_and_reports(cache, capsys):
    result = train_lm.main([*QUICK, "--cache", str(cache)])
    shown = capsys.readouterr().out
    assert result["first_loss"] == pytest.approx(math.log(600), abs=0.3)
    assert result["last_loss"] < result["first_loss"] - 0.7
    assert 1.0 < result["held_out_loss"] < result["first_loss"] - 0.7
    assert 3 / 600 < result["accuracy"] < result["among_10"] < 1.0
    assert result["among_10"] > 30 / 600
    assert result["logits_bytes"] == 4 * 4 * 32 * 600
    assert result["tokens_per_second"] == pytest.approx(60 * 4 * 31 / result["seconds"])
    for words in ("loss on held-out text", "logits that were never made", "tokens/s", "right next token"):
        assert words in shown


def test_training_never_sees_logits_and_the_model_keeps_them(cache):
    settings = train_lm.Settings(steps=2, batch=2, length=16, vocabulary=600, hidden=32, layers=1, held_out=64)
    tokens = torch.arange(600)
    model = train_lm.build_model(settings)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    train_lm.train(model, tokens, settings)
    assert seen == [None, None]
    model.eval()
    assert model(input_ids=tokens[None, :4]).logits.shape == (1, 4, 600)
    found = train_lm.evaluate(model, tokens[:64], settings)
    hidden, target = train_lm.hidden_states(model, tokens[:64], settings)
    logits = model.get_output_embeddings()(hidden)
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == target).float().mean().item())


def test_the_tokenizer_is_kept_and_loses_nothing(cache):
    tokenizer = train_lm.open_tokenizer([], 600, cache)  # from the cache: there is no text to learn from
    text = "def f(x):\n    return 'héllo 世界'\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 600


def test_too_little_text_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 40)
    with pytest.raises(SystemExit, match=r"entries, and 5,000 were asked for\. Give more text"):
        train_lm.open_tokenizer(train_lm.read_texts([tmp_path], 1.0), 5000, tmp_path / "cache")
    with pytest.raises(SystemExit, match=r"no text in .*: wanted files named \.md, \.py"):
        train_lm.read_texts([tmp_path / "cache"], 1.0)
    with pytest.raises(SystemExit, match="less than one sequence"):
        next(train_lm.sequences(torch.arange(10), train_lm.Settings(length=16)))


def test_the_default_text_is_on_every_machine():
    (text, *_) = train_lm.read_texts(train_lm.default_folders()[:1], 0.001)
    assert len(text) > 200


def test_probabilities_by_rank():
    hidden, head = torch.randn(50, 8), torch.randn(300, 8)
    want = (hidden @ head.T).softmax(1).sort(1, descending=True).values.mean(0)
    got = lm_figures.probability_by_rank(hidden, head, rows=7)
    assert relative_error(got, want) < 1e-6
    assert got.sum().item() == pytest.approx(1.0)


def test_noise_compares_runs_of_the_same_seed():
    def run(tolerance, seed, *losses):
        return {"tolerance": tolerance, "seed": seed, "held_out": list(enumerate(losses))}

    runs = [
        run(0.0, 1, 5.0, 4.0, 3.0),
        run(0.0, 2, 5.0, 4.5, 3.4),
        run(0.01, 1, 5.0, 4.2, 3.1),
        run(0.01, 2, 5.0, 4.5, 3.2),
    ]
    found = lm_figures.noise(runs)
    assert found["seeds"]["final_apart"] == pytest.approx(0.4)
    assert found["seeds"]["curve_apart"] == pytest.approx(0.5)
    assert found["0.01"] == {"final_apart": pytest.approx(0.2), "curve_apart": pytest.approx(0.2)}


def test_the_figures_are_trained_and_drawn(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_figures, "TINY", lm_figures.TINY | {"vocabulary": 600})
    small = tuple(lm_figures.Settings(steps=2, **lm_figures.TINY) for _ in range(2))
    monkeypatch.setattr(lm_figures, "SMALL", small)
    path = tmp_path / "fig.json"
    more = ["--text", str(TEXT), str(ROOT / "tests" / "losses"), "--seeds", "2", "--cache", str(cache)]
    lm_figures.main(["--small", "--out", str(path), *more])
    report = json.loads(path.read_text())
    assert report["figure_3"]["rank"][0] == 1
    assert report["figure_3"]["rank"][-1] == 600
    assert report["figure_3"]["probability"] == sorted(report["figure_3"]["probability"], reverse=True)
    runs = report["figure_4"]["runs"]
    assert [(r["tolerance"], r["seed"]) for r in runs[:4]] == [(0.0, 1), (1e-3, 1), (1e-2, 1), (0.0, 2)]
    assert all(r["largest_dropped"] <= r["tolerance"] for r in runs)
    assert runs[0]["losses"] != runs[3]["losses"]
    assert set(report["figure_4"]["noise"]) == {"seeds", "0.001", "0.01"}
    if (tmp_path / "fig-figure-3.svg").exists():  # where matplotlib is
        assert all((tmp_path / f"fig-figure-{n}.png").stat().st_size > 5000 for n in (3, 4))
