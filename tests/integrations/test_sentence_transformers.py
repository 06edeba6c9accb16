"""The drop-in losses inside of sentence-transformers itself, where it is installed: its wrappers and its dropout."""

from __future__ import annotations

import copy
import importlib
import random

import pytest
import torch
from tests.compare import assert_close

from tilewise.integrations import sentence_transformers as ours

package = pytest.importorskip("sentence_transformers", minversion="6.2")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the package
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny BERT with dropout and mean pooling."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("bert"))
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1} | {w: i + 2 for i, w in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    BertModel(BertConfig(vocab_size=len(WORDS) + 2, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    models = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    word_model = models.Transformer(folder, max_seq_length=12)
    pooling = models.Pooling(word_model.get_word_embedding_dimension())
    return package.SentenceTransformer(modules=[word_model, pooling], device="cpu").train()


def sentences(encoder, columns):
    """Features of ``columns`` columns of 6 sentences; the lengths differ between columns."""
    draw = random.Random(0)
    texts = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 5 + 2 * c))) for _ in range(6)] for c in range(columns)]
    return [encoder.tokenize(column) for column in texts]


def step(encoder, loss, batch):
    """Loss and gradient of all parameters, with fixed random numbers."""
    encoder.zero_grad()
    torch.manual_seed(1)
    random.seed(1)
    value = loss([dict(features) for features in batch], None)
    value.backward()
    grads = [p.grad.flatten() for p in encoder.parameters() if p.grad is not None]
    return value.detach(), torch.cat(grads)


WRAPPERS = {
    "no wrapper": lambda encoder, loss: loss,
    "MatryoshkaLoss": lambda encoder, loss: losses.MatryoshkaLoss(encoder, loss, [16, 8]),
    "AdaptiveLayerLoss": lambda encoder, loss: losses.AdaptiveLayerLoss(encoder, loss),
    "Matryoshka2dLoss": lambda encoder, loss: losses.Matryoshka2dLoss(encoder, loss, [16, 8]),
}


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_same_loss_and_gradients_with_dropout(encoder, wrapper, columns):
    """Three or more columns are merged into one forward, so equal results need the same forwards."""
    batch = sentences(encoder, columns)
    want = step(encoder, WRAPPERS[wrapper](encoder, losses.MultipleNegativesRankingLoss(encoder)), batch)
    got = step(encoder, WRAPPERS[wrapper](encoder, ours.MultipleNegativesRankingLoss(encoder)), batch)
    assert_close(got[0], want[0], 1e-5, "loss")
    assert_close(got[1], want[1], 1e-4, "gradients")


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
def test_hardness(encoder, mode, columns):
    batch = sentences(encoder, columns)
    settings = {"hardness_mode": mode, "hardness_strength": 5.0}
    want = step(encoder, losses.MultipleNegativesRankingLoss(encoder, **settings), batch)
    got = step(encoder, ours.MultipleNegativesRankingLoss(encoder, **settings), batch)
    assert_close(got[0], want[0], 1e-5, "loss")
    assert_close(got[1], want[1], 1e-4, "gradients")


@pytest.mark.parametrize("wrapper", ["no wrapper", "MatryoshkaLoss", "cached"])
@pytest.mark.parametrize("guide_length", [12, 3], ids=["same tokens", "tokenized again"])
def test_guided_losses(encoder, wrapper, guide_length):
    """The guide is a copy with other weights, without dropout. Fewer tokens than those of the model are read again."""
    guide = copy.deepcopy(encoder).eval()
    torch.manual_seed(2)
    for weight in guide.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    guide.max_seq_length = guide_length
    assert ours.GISTEmbedLoss(encoder, guide).must_retokenize == (guide_length == 3)
    batch, settings = sentences(encoder, 3), {"temperature": 0.1, "margin": 0.02}
    if wrapper == "cached":
        kinds = (losses.CachedGISTEmbedLoss, ours.CachedGISTEmbedLoss)
        want, got = (step(encoder, kind(encoder, guide, mini_batch_size=4, **settings), batch) for kind in kinds)
    else:
        wrap, kinds = WRAPPERS[wrapper], (losses.GISTEmbedLoss, ours.GISTEmbedLoss)
        want, got = (step(encoder, wrap(encoder, kind(encoder, guide, **settings)), batch) for kind in kinds)
    assert_close(got[0], want[0], 1e-5, "loss")
    assert_close(got[1], want[1], 1e-4, "gradients")


@pytest.mark.parametrize("wrapper", ["no wrapper", "MatryoshkaLoss"])
@pytest.mark.parametrize("chunk", [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 9, "show_progress_bar": True}])
@pytest.mark.parametrize("name", ["CachedMultipleNegativesRankingLoss", "CachedGISTEmbedLoss"])
def test_cached_losses_with_dropout(encoder, name, chunk, wrapper):
    """Chunks of the same rows and without their padding, so that dropout draws the same numbers."""
    guide = (copy.deepcopy(encoder).eval(),) if "GIST" in name else ()
    batch = sentences(encoder, 3)
    want, got = (
        step(encoder, WRAPPERS[wrapper](encoder, getattr(package, name)(encoder, *guide, **chunk)), batch)
        for package in (losses, ours)
    )
    assert_close(got[0], want[0], 1e-5, "loss")
    assert_close(got[1], want[1], 1e-4, "gradients")


def test_layers_around_the_cached_loss_are_refused(encoder):
    cached = ours.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=3)
    with pytest.warns(UserWarning, match="not compatible"):
        losses.AdaptiveLayerLoss(encoder, cached)


def test_the_trainer_masks_false_negatives_by_label(encoder, tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ["a", "b", "a", "c"]
    rows = {
        "query": [f"w{i} w1" for i in range(4)],
        "document": [f"w{ord(n) % 40} w2 w3" for n in names],
        "label": ours.hash_ids(names).tolist(),
    }
    seen = []

    class Recording(ours.MultipleNegativesRankingLoss):
        def compute_loss_from_embeddings(self, embeddings, labels=None):
            seen.append(labels)
            return super().compute_loss_from_embeddings(embeddings, labels)

    arguments = package.SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = package.SentenceTransformerTrainer(
        model=encoder,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        loss=Recording(encoder, labels_as_ids=True),
    )
    trainer.train()
    assert sorted(seen[0].tolist()) == sorted(rows["label"])
