"""transformers loads the model that the example has trained and saved."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from examples import train_lm

TEXT = Path(__file__).parents[2] / "benchmarks"
QUICK = f"--vocabulary 600 --hidden 32 --layers 1 --batch 2 --length 32 --steps 3 --text {TEXT} --megabytes 1".split()


def test_the_saved_model_is_the_trained_one(tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = []
    monkeypatch.setattr(train_lm, "build_model", lambda settings: trained.append(build(settings)) or trained[0])
    train_lm.main([*QUICK, "--cache", str(tmp_path / "cache"), "--save", str(tmp_path / "deep" / "model")])
    assert "from_pretrained" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "model")
    words = "import os\n\ndef main():\n    return None"
    ids = tokenizer(words, return_tensors="pt").input_ids
    kept = train_lm.open_tokenizer([], 600, train_lm.cache_for([TEXT], tmp_path / "cache"))
    assert ids[0].tolist() == kept.encode(words).ids
    assert tokenizer.decode(ids[0]) == words
    assert tokenizer.eos_token == train_lm.END
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trained[0].cpu().eval()(input_ids=ids).logits)


build = train_lm.build_model


def test_a_folder_that_cannot_be_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="--save needs a folder"):
        train_lm.main([*QUICK, "--cache", str(tmp_path), "--save", str(tmp_path / "file" / "model")])


def test_sequences_longer_than_the_held_out_text_are_evaluated(tmp_path, capsys):
    longer = str(train_lm.Settings().held_out + 4)
    result = train_lm.main([*QUICK, "--batch", "1", "--steps", "1", "--length", longer, "--cache", str(tmp_path)])
    assert result["held_out_loss"] > 0.0


@pytest.mark.parametrize("name, value", [("steps", 0), ("batch", 0), ("length", 1), ("vocabulary", 100)])
def test_sizes_that_cannot_be_are_refused_before_training(name, value, tmp_path):
    with pytest.raises(SystemExit, match=f"--{name} must be at least"):
        train_lm.main([*QUICK, f"--{name}", str(value), "--cache", str(tmp_path)])
