import pytest
import torch
import torch.nn.functional as F

from tilewise.errors import RangeError
from tilewise.train.data.open import EvalImages, EvalPairs
from tilewise.train.evaluate import (
    Encoders,
    chance_recall,
    class_features,
    encode_pairs,
    evaluate_retrieval,
    evaluate_zero_shot,
    rank_pairs,
    ranking_metrics,
)
from tilewise.train.right_answers import right_answers


class LookUp(torch.nn.Module):
    """A model with image features from the pixels and text features from a table of words."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.image = lambda pixels: F.normalize(pixels.float().flatten(1), dim=1)
        self.text = lambda rows: F.normalize(rows, dim=1)

    def tokenizer(self, texts):
        return {"rows": torch.stack([sum(self.table[w] for w in t.split()) for t in texts])}


def encoders(table):
    return Encoders(LookUp(table), torch.device("cpu"), chunk_size=3)


def axis(i, d=6):
    return F.one_hot(torch.tensor(i), d).float()


def pixels(*rows):
    return torch.stack([(255 * row).to(torch.uint8).view(1, 2, 3) for row in rows])


def test_recall_counts_every_right_answer_in_both_directions():
    table = {f"w{i}": axis(i) for i in range(6)}
    images = pixels(axis(0), axis(1), axis(2), axis(3))
    # Captions 0 and 1 belong to image 0; caption w2 to image 1, whose picture shows w1: wrong.
    texts, text_ids = ["w0", "w0 w5", "w2", "w2", "w3"], torch.tensor([0, 0, 1, 2, 3])
    pairs = EvalPairs(EvalImages(images), torch.arange(4), texts, text_ids)
    found = evaluate_retrieval(encoders(table), pairs, ks=(1, 2))
    # Images 1 and 2 have the same caption, so both are right for it, and both captions for each of them.
    assert found["t2i_r1"] == pytest.approx(5 / 5)
    assert found["i2t_r1"] == pytest.approx(3 / 4)
    assert found["t2i_chance1"] == pytest.approx((1 + 1 + 2 + 2 + 1) / 4 / 5)
    assert found["i2t_chance1"] == pytest.approx((2 + 2 + 2 + 1) / 5 / 4)
    own = ranking_metrics(rank_pairs(*encode_pairs(encoders(table), pairs), right_answers(pairs, True)), ks=(1, 2))
    assert own["t2i_r1"] == pytest.approx(4 / 5)
    assert own["i2t_r1"] == pytest.approx(2 / 4)  # image 2 ties between two captions, and the first is not its own
    assert own["t2i_chance1"] == pytest.approx(1 / 4)
    assert own["i2t_chance1"] == pytest.approx((2 / 5 + 3 * 1 / 5) / 4)


def test_images_that_share_an_id_are_all_right():
    table = {"a": axis(0), "b": axis(1)}
    images = pixels(axis(1), axis(0), axis(0))
    ids = torch.tensor([0, 0, 1])
    table["c"] = table["a"]
    pairs = EvalPairs(EvalImages(images), ids, ["a", "b", "c"], ids)
    found = evaluate_retrieval(encoders(table), pairs, ks=(1,))
    assert found["t2i_r1"] == pytest.approx(2 / 3)  # for "c" images 1 and 2 tie: the first is right for id 0 only
    assert evaluate_retrieval(encoders(table), pairs, ks=(2,))["t2i_r2"] == 1.0
    assert found["t2i_chance1"] == pytest.approx((2 / 3 + 2 / 3 + 1 / 3) / 3)
    assert found["t2i_map"] == pytest.approx(((1 + 2 / 3) / 2 + 1 + 1 / 2) / 3)


def test_equal_captions_are_right_and_the_other_captions_of_their_images_are_not():
    """Three images with one caption are three right answers; ids join the captions and images of each id."""
    texts, owners = ["dog", "dog", "dog", "a cat", "dog at sea"], torch.tensor([0, 1, 2, 3, 1])
    pairs = EvalPairs(EvalImages(pixels(*map(axis, range(4)))), torch.arange(4), texts, owners)
    found = right_answers(pairs)
    assert found.images.tolist() == [[0, 1, 2]] * 3 + [[3, -1, -1], [1, -1, -1]]
    assert found.captions.tolist() == [[0, 1, 2, -1], [0, 1, 2, 4], [0, 1, 2, -1], [3, -1, -1, -1]]
    assert right_answers(pairs, own_captions=True).captions.tolist() == [[0, -1], [1, 4], [2, -1], [3, -1]]
    ids = torch.tensor([0, 0, 1, 1])  # of products, each with two images
    pairs = EvalPairs(EvalImages(pixels(*map(axis, range(4)))), ids, ["v", "w", "x", "y"], ids)
    assert right_answers(pairs).images.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("own_captions", [False, True])
def test_several_captions_of_an_image_are_scored_as_a_stored_matrix(own_captions):
    """Recall is 1 for a query with any right answer among the first k, as in clip-benchmark 1.6.2."""
    generator = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(40, 16, generator=generator), dim=1)
    owners = torch.arange(40).repeat_interleave(5)
    text = F.normalize(image[owners] + 1.2 * torch.randn(200, 16, generator=generator) / 4, dim=1)
    texts = [f"caption {i}" for i in range(200)]
    for one, other in ((3, 60), (7, 90), (7, 150)):
        texts[other], text[other] = texts[one], text[one]
    pairs = EvalPairs(EvalImages(torch.zeros(40, 1)), torch.arange(40), texts, owners)
    got = ranking_metrics(rank_pairs(text, image, right_answers(pairs, own_captions)))
    right_tn = owners[:, None] == torch.arange(40)
    if not own_captions:
        right_tn = torch.stack([right_tn[[t == u for u in texts]].any(0) for t in texts])
    scores = text.double() @ image.double().T
    for name, x, right in (("t2i", scores, right_tn), ("i2t", scores.T, right_tn.T)):
        ordered = right.gather(1, x.argsort(dim=1, descending=True, stable=True)).double()
        places = torch.arange(1.0, ordered.shape[1] + 1).double()
        for k in (1, 5, 10):
            assert got[f"{name}_r{k}"] == pytest.approx((ordered[:, :k].sum(1) > 0).double().mean().item(), rel=1e-12)
        precision = ordered.cumsum(1) / places
        assert got[f"{name}_map"] == pytest.approx(((precision * ordered).sum(1) / ordered.sum(1)).mean().item())
        assert got[f"{name}_mrr"] == pytest.approx((ordered / places).amax(1).mean().item())
        gain = (ordered / torch.log2(places + 1))[:, :10].sum(1)
        best = (ordered.sort(1, True).values / torch.log2(places + 1))[:, :10].sum(1)
        assert got[f"{name}_ndcg10"] == pytest.approx((gain / best).mean().item())
    assert got["t2i_r1"] < 0.95


def test_chance_is_what_random_orders_give():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 12, (40,), generator=generator)
    hits = torch.zeros(())
    for _ in range(300):
        order = torch.randperm(40, generator=generator)
        hits += (ids[order[:5]][None] == ids[:, None]).any(1).float().mean() / 300
    right = ids.bincount()[ids]
    assert chance_recall(right, 40, 5) == pytest.approx(hits.item(), abs=0.02)
    assert chance_recall(torch.tensor([1, 0]), 2, 1) == 0.5  # a query without an answer is left out
    assert chance_recall(right, 40, 40) == 1.0


def test_zero_shot_ranks_classes_through_templates():
    table = {f"c{i}": axis(i) for i in range(6)} | {"a": 0.1 * axis(5), "photo": 0.1 * axis(4)}
    images = pixels(axis(0), axis(1), axis(2), axis(2))
    labels = torch.tensor([0, 1, 2, 1])
    classes = [f"c{i}" for i in range(6)]
    found = evaluate_zero_shot(encoders(table), [images], labels, classes, ["a photo {}", "{}"])
    assert found["top1"] == 0.75
    assert found["top5"] == 1.0
    assert found["top1_chance"] == 1 / 6
    assert found["top5_chance"] == 5 / 6
    features = class_features(encoders(table), classes, ["a photo {}", "{}"])
    want = F.normalize(F.normalize(axis(0) + table["a"] + table["photo"], dim=0) + axis(0), dim=0)
    assert (features[0] - want).norm() < 1e-6


def test_templates_without_a_place_for_the_class_are_refused():
    with pytest.raises(RangeError, match=r"\{\}"):
        class_features(encoders({}), ["a"], ["a photo"])
    with pytest.raises(RangeError, match="0 and 1"):
        class_features(encoders({}), [], ["{}"])


def test_zero_shot_names_the_class_that_images_are_taken_for():
    table = {name: axis(i) for i, name in enumerate("abcd")}
    images = pixels(axis(0), axis(1), axis(1), axis(2), axis(1), axis(1))
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    found = evaluate_zero_shot(encoders(table), [images], labels, list("abcd"))["per_class"]
    assert found["a"] == {"images": 4, "top1": 0.25, "taken_for": "b"}
    assert found["b"] == {"images": 2, "top1": 1.0, "taken_for": ""}
    assert found["c"] == {"images": 0, "top1": 0.0, "taken_for": ""}
