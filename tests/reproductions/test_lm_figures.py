"""The example and the figures train a small language model."""

import copy
import functools
import json
import math
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.compare import relative_error

from examples import train_lm
from reproductions import lm_figures, lm_held_out, lm_pictures, lm_text

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "reproductions"
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
    assert 1.0 < result["held_out_loss"] < result["first_loss"] - 0.5  # the text depends on the installed packages
    assert 3 / 600 < result["accuracy"] < result["among_10"] < 1.0
    assert result["among_10"] > 30 / 600
    assert result["logits_bytes"] == 4 * 4 * 32 * 600
    assert result["tokens_per_second"] == pytest.approx(60 * 4 * 31 / result["seconds"])
    for words in ("loss on held-out text", "logits that were never stored", "tokens/s", "right next token"):
        assert words in shown


def test_training_never_sees_logits_and_the_model_keeps_them(cache):
    settings = train_lm.Settings(steps=2, batch=2, length=16, vocabulary=600, hidden=32, layers=1, held_out=64)
    tokens = torch.arange(600)
    model = train_lm.build_model(settings)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    train_lm.train(model, tokens, settings)
    assert [type(logits).__name__ for logits in seen[-2:]] == ["NoLogits", "NoLogits"]
    tensors = [logits for logits in seen if isinstance(logits, torch.Tensor)]
    assert all(logits.shape[:2].numel() < 2 * 16 for logits in tensors), "a few tokens, to verify"
    model.eval()
    assert model(input_ids=tokens[None, :4]).logits.shape == (1, 4, 600)
    found = train_lm.evaluate(model, tokens[:64], settings)
    hidden, target = train_lm.hidden_states(model, tokens[:64], settings)
    logits = model.get_output_embeddings()(hidden)
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == target).float().mean().item())


def test_the_tokenizer_is_kept_and_loses_nothing(cache):
    tokenizer = train_lm.open_tokenizer([], 600, cache)  # from the cache: no text is given
    text = "def f(x):\n    return 'héllo 世界'\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 600


def test_too_little_text_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 40)
    with pytest.raises(SystemExit, match=r"a vocabulary of .*, not 5,000\. Pass more text"):
        train_lm.open_tokenizer(train_lm.read_texts([tmp_path], 1.0), 5000, tmp_path / "cache")
    with pytest.raises(SystemExit, match=r"no text in .*\. Files must end in \.md, \.py"):
        train_lm.read_texts([tmp_path / "cache"], 1.0)
    with pytest.raises(SystemExit, match="fewer than one sequence"):
        next(train_lm.sequences(torch.arange(10), train_lm.Settings(length=16)))


def test_other_text_has_a_tokenizer_of_its_own(tmp_path):
    assert train_lm.cache_for(None, tmp_path) == train_lm.cache_for([], tmp_path) == tmp_path
    one, two = (train_lm.cache_for([tmp_path / name], tmp_path) for name in ("one", "two"))
    assert one.parent == two.parent == tmp_path
    assert one != two
    assert train_lm.cache_for([tmp_path / "one"], tmp_path) == one


@pytest.mark.parametrize(
    "arguments, words",
    [(["--steps", "0"], "--steps .* at least 1, got 0"), (["--filter-tolerance", "3"], r"mass in \[0, 1\).*, got 3")],
)
def test_settings_out_of_range_are_a_sentence(arguments, words):
    with pytest.raises(SystemExit, match=words):
        train_lm.main(arguments)


def test_the_default_text_is_on_every_machine():
    (text, *_) = train_lm.read_texts(train_lm.default_folders()[:1], 0.001)
    assert len(text) > 200


def test_probabilities_by_rank():
    hidden, head, target = torch.randn(50, 8), torch.randn(300, 8), torch.randint(300, (50,))
    logits = hidden @ head.T
    want = logits.softmax(1).sort(1, descending=True).values.mean(0)
    got, found = lm_held_out.probability_by_rank(hidden, head, target, rows=7)
    assert relative_error(got, want) < 1e-6
    assert got.sum().item() == pytest.approx(1.0)
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-6)
    best = logits.topk(10, 1).indices == target[:, None]
    assert found["accuracy"] == pytest.approx(best[:, 0].float().mean().item())
    assert found["among_10"] == pytest.approx(best.any(1).float().mean().item())
    assert lm_held_out.probability_by_rank(hidden, head, logits.argmax(1))[1]["accuracy"] == 1.0


def test_the_held_out_loss_is_that_of_the_example():
    settings = lm_figures.Settings(steps=2, **lm_figures.TINY)
    model, tokens = train_lm.build_model(settings), torch.arange(96) * 5
    want = train_lm.evaluate(model, tokens, settings)["loss"]
    assert lm_held_out.held_out_loss(model, tokens, settings, rows=7) == pytest.approx(want, rel=1e-6)
    found = lm_held_out.figure_3(model, tokens, tokens[:32], settings)
    assert found["loss"] == pytest.approx(want, rel=1e-6)
    assert found["other"]["loss"] == pytest.approx(train_lm.evaluate(model, tokens[:32], settings)["loss"], rel=1e-6)
    assert "other" not in lm_held_out.figure_3(model, tokens, tokens[:0], settings)


def tuned(name, *losses, tolerance=0.0, batches=1, masks=1, **more):
    run = {"name": name, "tolerance": tolerance, "batches": batches, "masks": masks, "losses": list(losses)}
    return run | {"held_out": list(enumerate(losses)), "skipping": [], "step_ms": 1.0} | more


RUNS = [
    tuned("exact", 5.0, 4.0, 3.0),
    tuned("filter 0.01", 5.0, 4.2, 3.1, tolerance=0.01),
    tuned("dense", 5.0, 4.0, 3.05, tolerance=None),
    tuned("exact, other masks", 5.0, 4.3, 3.2, masks=2),
    tuned("exact, other batches", 5.0, 4.5, 3.4, batches=2),
    tuned("exact, again", 5.0, 4.0, 3.0),
    tuned("filter 0.01, other batches", 5.0, 4.5, 3.2, tolerance=0.01, batches=2),
]


def test_a_run_is_compared_with_the_exact_one_of_its_batches():
    found = lm_figures.differences(RUNS)
    assert [one["name"] for one in RUNS[1:]] == list(found)
    assert found["filter 0.01"] == pytest.approx(
        {"against": "exact", "final": 0.1, "largest": 0.2, "largest_of_a_step": 0.2}
    )
    assert found["filter 0.01, other batches"]["against"] == "exact, other batches"
    assert found["filter 0.01, other batches"]["largest"] == pytest.approx(0.2)
    assert found["exact, other batches"] == pytest.approx({"against": "exact", "final": 0.4, "largest": 0.5})
    assert "largest_of_a_step" not in found["exact, other masks"]  # other masks give other losses
    assert found["exact, again"]["largest"] == 0.0
    assert lm_figures.differences(RUNS[1:3]) == {}


def test_words_say_what_skipping_did_beside_the_noise():
    four = {"runs": RUNS, "differences": lm_figures.differences(RUNS), "no_time_for": []}
    said = lm_pictures.verdict(four)
    assert "at most 2.0e-01 from the exact one (filter 0.01)" in said
    assert "differ by more: exact, other masks (3.0e-01), exact, other batches (5.0e-01).\n" in said
    assert "differ by no more: dense (5.0e-02), exact, again (0.0e+00).\n" in said
    assert "in which backward dropped pairs: none." in said
    assert "too few" in lm_pictures.verdict({"runs": RUNS[:1], "differences": {}})
    skip, whole = ({"kept_share": 0.02, "skips": True, "mean_dropped": 1e-3, "largest_dropped": 2e-3},) * 2
    whole = whole | {"kept_share": 0.3, "skips": False}
    looked = [RUNS[0], RUNS[1] | {"skipping": [skip, whole]}, tuned("b", 1.0, tolerance=0.001, skipping=[whole])]
    said = lm_pictures.verdict(four | {"runs": looked})
    assert said.endswith("in which backward dropped pairs: 0 of 1 at 0.001, 1 of 2 at 0.01.")
    assert "| 2 to 2 % | 1.0e-03, 2.0e-03 |" in lm_pictures.run_line(tuned("a", 1.0, skipping=[skip]), {})
    assert "| 2 to 2 %, all in 1 of 2 steps |" in lm_pictures.run_line(tuned("a", 1.0, skipping=[skip, whole]), {})
    assert "| all (30 to 30 % are needed) |" in lm_pictures.run_line(tuned("a", 1.0, skipping=[whole]), {})
    assert "would need 30 % of the (row, tile) pairs, so it computes all" in lm_pictures.of_tolerance("0.01", whole)
    unseen = whole | {"kept_share": 1.0}  # a sample of the rows decided, so pairs were not counted
    assert "| all | " in lm_pictures.run_line(tuned("a", 1.0, skipping=[unseen]), {})
    assert "computes all (row, tile) pairs" in lm_pictures.of_tolerance("0.01", unseen)


def sure_model(settings):
    """A model whose scores fall as -2 ln(index of the word), by one large feature that has one sign in all states."""
    model = train_lm.build_model(settings)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight  # also the embedding
        weight[:, 0] = -0.5 * torch.arange(1.0, len(weight) + 1).log() - 1.0
        model.model.norm.weight[0] = -4.0 / settings.hidden**0.5
        model.model.layers[0].self_attn.o_proj.weight *= 10.0  # makes dropout masks matter
    return model


def test_backward_skips_by_itself_and_the_run_says_so(filter_on_cpu):
    settings = lm_figures.Settings(steps=6, **lm_figures.TINY | {"vocabulary": 4096, "batch": 4})
    text = (4096 ** torch.rand(2000, generator=torch.Generator().manual_seed(0))).long() - 1
    model = sure_model(settings)
    before = copy.deepcopy(model.state_dict())
    runs = {v.name: lm_figures.fine_tune(model, text, text[:64], settings, v) for v in lm_figures.VARIANTS}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for tolerance in (1e-3, 1e-2):
        seen = runs[f"filter {tolerance:g}"]["skipping"]
        assert [one["step"] for one in seen] == [0, 1, 2, 3, 4, 5]
        assert all(one["mean_dropped"] <= one["largest_dropped"] <= tolerance for one in seen)
    loose, tight = (runs[f"filter {t}"]["skipping"][0] for t in (0.01, 0.001))
    assert loose["skips"]
    assert 0.0 < loose["kept_share"] < min(0.2, tight["kept_share"])
    assert loose["largest_dropped"] > 1e-3
    assert runs["exact"]["skipping"] == runs["dense"]["skipping"] == []
    found = lm_figures.differences(list(runs.values()))
    assert found["dense"]["largest_of_a_step"] < 1e-4 < found["exact, other masks"]["largest"]  # the masks are the same
    assert 0.0 < found["filter 0.01"]["largest"] < found["exact, other masks"]["largest"]
    assert found["exact, again"]["largest"] < 1e-5
    assert [step for step, _ in runs["exact"]["held_out"]] == [0, 1, 2, 3, 4, 5, 6]
    assert all(0.0 < run["held_out_seconds"] < run["seconds"] for run in runs.values())


def test_steps_are_timed_between_looks_and_the_one_after_a_look_is_recorded():
    settings = lm_figures.Settings(steps=25, **lm_figures.TINY)
    text = torch.randint(500, (400,), generator=torch.Generator().manual_seed(0))
    model = train_lm.build_model(settings)
    run = lm_figures.fine_tune(model, text, text[:64], settings, lm_figures.VARIANTS[1])
    assert [step for step, _ in run["held_out"]] == [0, *lm_figures.steps_to_look_at(25)]
    assert [one["step"] for one in run["skipping"]] == [step for step, _ in run["held_out"][:-1]]
    assert 0.0 < 25e-3 * run["step_ms"] < 3 * run["seconds"]
    assert len(run["losses"]) == 25


def test_the_steps_are_as_many_as_fit(monkeypatch):
    settings = lm_figures.Settings(steps=500, **lm_figures.TINY)
    text = torch.arange(400)
    model = train_lm.build_model(settings)
    monkeypatch.setattr(lm_figures, "pace", lambda model, text, s: 0.02 + s.options.filter_tolerance)  # at most 0.03
    now, each = [0.0], 0.03 * 100
    monkeypatch.setattr(lm_figures, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def held_out_loss(model, some, settings):
        now[0] += slow if len(some) == 400 else 1e-6

    monkeypatch.setattr(lm_figures, "held_out_loss", held_out_loss)
    slow = 1e-6
    time = lm_figures.Clock(len(lm_figures.VARIANTS) * each / 0.9)
    found, held_out = lm_figures.that_fits(model, text, text, settings, time)
    assert 98 <= found.steps <= 100
    assert len(held_out) == 400
    assert lm_figures.that_fits(model, text, text, settings, lm_figures.Clock(1e3))[0].steps == 500
    assert lm_figures.that_fits(model, text, text, settings, lm_figures.Clock(1e-3))[0].steps == 2
    # An evaluation takes a fifth of a run. All 11 may take a quarter, which is 1 / 8.8 of the text.
    slow = each / 5
    time = lm_figures.Clock(len(lm_figures.VARIANTS) * each / 0.9)
    found, held_out = lm_figures.that_fits(model, text, text, settings, time)
    assert 72 <= found.steps <= 75
    assert len(held_out) == 32


def test_text_travels_in_a_file(cache, tmp_path, capsys):
    tokens = torch.tensor([0, 255, 256, 65_535, 65_536, 102_399])
    assert torch.equal(lm_text.unpack(lm_text.pack(tokens)), tokens)
    where = ["--text", str(TEXT), str(ROOT / "tests" / "losses"), "--cache", str(cache), "--tokens", "900", "500"]
    settings = [lm_figures.Settings(steps=2, **lm_figures.TINY | {"vocabulary": 600})] * 2
    path = lm_text.prepare(lm_figures.parse(["--prepare", str(tmp_path / "a" / "text.npz"), *where]), settings)
    said = capsys.readouterr().out
    assert "tokens: pretraining 900, tuning 500, held_out 64, other 0;" in said
    assert "also in pretraining: tuning " in said
    data = lm_figures.parse(["--data", str(path)])
    read, described = lm_text.read_tokens(data, settings)
    assert described["tokens"] == {name: len(some) for name, some in read.items()}
    assert described["said"] == {
        "pretraining": "reproductions",
        "tuning": "losses",
        "held_out": "other files of losses",
        "other": "",
    }
    direct, _ = lm_text.read_tokens(lm_figures.parse(where), settings)
    assert torch.equal(direct["tuning"], read["tuning"][: len(direct["tuning"])])
    assert torch.equal(direct["held_out"], read["held_out"])
    with pytest.raises(SystemExit, match="vocabulary of 600, and the model one of 500"):
        lm_text.read_tokens(data, lm_figures.SMALL)
    numpy.savez(tmp_path / "old.npz", pretraining=lm_text.pack(tokens), tuning=lm_text.pack(tokens))
    with pytest.raises(SystemExit, match=r"needs the texts .*, and has pretraining, tuning\. Write it again"):
        lm_text.read_tokens(lm_figures.parse(["--data", str(tmp_path / "old.npz")]), settings)


def test_no_file_is_in_two_texts():
    texts = {"pretraining": [*"abcdef", "test"], "tuning": [*"defg"], "held_out": [*"gh"], "other": [*"az"]}
    kept = lm_text.without_repeats(texts, ["test"])
    assert kept == {"pretraining": [*"bc"], "tuning": [*"def"], "held_out": [*"gh"], "other": [*"az"]}
    assert list(kept) == list(lm_text.NAMES)


def test_files_that_are_tuned_on_were_not_learned():
    texts, _ = lm_text.default_texts(megabytes=1.0)  # of each
    files = {name: set(some) for name, some in texts.items()}
    assert all(files.values())
    assert sum(map(len, files.values())) == len(set().union(*files.values()))


def test_held_out_sequences_come_from_all_files(cache):
    tokenizer = train_lm.open_tokenizer([], 600, cache)
    texts = [word * 60 for word in ("one ", "two ", "three ", "four ")]
    found = lm_text.spread(texts, tokenizer, 16, 80)
    assert len(found) == 80
    words = tokenizer.decode(found.tolist())
    assert all(word in words for word in ("one", "two", "three", "four"))


def test_overlap_counts_what_was_copied():
    seen = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert lm_text.overlap(seen[100:400], seen) == 1.0
    assert lm_text.overlap(seen[100:400].flip(0), seen) == 0.0
    assert lm_text.overlap(torch.cat([seen[:115], seen[:185].flip(0)]), seen) == pytest.approx(100 / 285)
    assert lm_text.overlap(seen[:3], seen) == 0.0


def test_the_figures_are_trained_and_drawn(cache, tmp_path, monkeypatch, capsys):
    small = tuple(lm_figures.Settings(steps=n, **lm_figures.TINY | {"vocabulary": 600}) for n in (6, 3))
    monkeypatch.setattr(lm_figures, "SMALL", small)
    docs = tmp_path / "page.md"
    docs.write_text("before <!-- lm-figures:begin --> old <!-- lm-figures:end --> after\n")
    short = tmp_path / "skipping.md"
    short.write_text("<!-- lm-figures:begin --><!-- lm-figures:end -->")
    monkeypatch.setattr(lm_pictures.write_docs, "__defaults__", (docs, short))
    path = tmp_path / "fig.json"
    more = ["--text", str(TEXT), str(ROOT / "tests" / "losses"), "--cache", str(cache)]
    lm_figures.main(["--small", "--out", str(path), *more])
    report, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert report["figure_3"]["rank"][0] == 1
    assert report["figure_3"]["rank"][-1] == 600
    assert report["figure_3"]["probability"] == sorted(report["figure_3"]["probability"], reverse=True)
    assert report["pretraining"]["steps"] == len(report["pretraining"]["losses"]) == 6
    runs = report["figure_4"]["runs"]
    assert [one["name"] for one in runs] == [variant.name for variant in lm_figures.VARIANTS]
    assert report["figure_4"]["no_time_for"] == []
    assert set(report["figure_4"]["differences"]) == {variant.name for variant in lm_figures.VARIANTS[1:]}
    assert "pretraining: step 6 of 6, loss" in capsys.readouterr().err
    assert all(f"\n| {one['name']} |" in page for one in runs)
    if (tmp_path / "fig-figure-3.svg").exists():  # if matplotlib is installed
        assert all((tmp_path / f"fig-figure-{n}.png").stat().st_size > 5000 for n in (3, 4))
    lm_figures.main(["--draw", "--docs", "--out", str(path)])
    written = docs.read_text()
    assert written.startswith("before <!-- lm-figures:begin -->\n**Figure 3.**")
    assert written.endswith("(fig-figure-4.png)\n<!-- lm-figures:end --> after\n") or "/fig-figure-4.png)" in written
    assert lm_pictures.words(report) in written
    assert lm_pictures.verdict(report["figure_4"]) in short.read_text()
    assert path.with_suffix(".md").read_text() == page


def test_what_the_time_does_not_allow_is_named(cache, tmp_path, monkeypatch):
    small = tuple(lm_figures.Settings(steps=1000, **lm_figures.TINY | {"vocabulary": 600}) for _ in range(2))
    monkeypatch.setattr(lm_figures, "SMALL", small)
    # A clock that any machine reads alike: 0.05 s later each time.
    monkeypatch.setattr(lm_figures, "time", SimpleNamespace(perf_counter=functools.partial(next, count(0.0, 0.05))))
    path = tmp_path / "fig.json"
    more = ["--text", str(TEXT), str(ROOT / "tests" / "losses"), "--cache", str(cache), "--max-seconds", "5"]
    lm_figures.main(["--small", "--out", str(path), *more])
    report = json.loads(path.read_text())
    assert 2 <= report["pretraining"]["steps"] < 1000
    assert 2 <= report["tuning"]["steps"] < 200
    names = [one["name"] for one in report["figure_4"]["runs"]] + report["figure_4"]["no_time_for"]
    assert sorted(names) == sorted(variant.name for variant in lm_figures.VARIANTS)
    path.unlink()
    lm_figures.main(["--small", "--out", str(path), *more, "--max-seconds", "0.01"])  # what was started is written
    report = json.loads(path.read_text())
    assert report["figure_3"]["rank"]
    assert ("-figure-4.png" in path.with_suffix(".md").read_text()) is bool(report["figure_4"]["runs"])


def committed():
    return sorted((ROOT / "reproductions" / "results").glob("lm-figures-*.json"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_committed_results_are_what_the_documentation_says(path):
    report = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == lm_pictures.page(report, path.stem)
    text = lm_pictures.DOCS.read_text()
    if f"{path.stem}-figure-3.png" in text:
        assert lm_pictures.words(report) in text
        assert lm_pictures.in_short(report) in lm_pictures.SKIPPING.read_text()
