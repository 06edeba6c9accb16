"""Metrics of rankings. The expected numbers are those of ir-measures 0.4.3 with pytrec_eval-terrier 0.5.11."""

import json

import pytest
import torch

import tilewise as tw
from tilewise.retrieval import write_beir, write_trec

RANKS = torch.tensor([[0, 3, 7], [2, -1, -1], [1, 0, 11], [-1, -1, -1], [5, 6, -1]])
RELEVANCE = torch.tensor([[3, 1, 2], [1, 0, 0], [1, 2, 3], [0, 0, 0], [2, 2, 0]])
# RR, AP, nDCG@3, nDCG@10, P@3, P@10, R@3, R@10, Success@3 of a run with 20 items for each query
WANTED = {
    "mrr": 0.6249999999999999,
    "map": 0.48363095238095233,
    "ndcg@3": 0.4206266215500959,
    "ndcg@10": 0.5820589411893643,
    "precision@3": 0.3333333333333333,
    "precision@10": 0.2,
    "recall@3": 0.5,
    "recall@10": 0.9166666666666666,
    "success@3": 0.75,
}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_equals_ir_measures(order):
    got = tw.retrieval_metrics(RANKS[:, order], RELEVANCE[:, order], ks=(3, 10))
    assert {name: got[name] for name in WANTED} == pytest.approx(WANTED, rel=1e-12)


def test_success_is_recall_at_k_and_grades_of_zero_are_wrong():
    got = tw.retrieval_metrics(RANKS, ks=(1, 3))
    assert {k: got[f"success@{k}"] for k in (1, 3)} == pytest.approx(tw.recall_at_k(RANKS, (1, 3)))
    one = tw.retrieval_metrics(RANKS[:, 0], ks=(3,))
    assert one == tw.retrieval_metrics(RANKS, torch.tensor([1, 0, 0]).expand(5, 3), ks=(3,))
    assert one != tw.retrieval_metrics(RANKS, ks=(3,))


def test_a_run_and_qrels_of_trec(tmp_path):
    queries, gallery = torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [2.0], [1.0]])
    found = tw.nearest(queries, gallery, 2)
    right, grades = torch.tensor([[1, -1], [0, 2]]), torch.tensor([[1, 0], [2, 0]])
    run, qrels = write_trec(tmp_path, ["q1", "q2"], ["a", "b", "c"], found, right, grades)
    assert run.read_text().splitlines() == [
        *("q1 Q0 a 1 2 tilewise", "q1 Q0 b 2 1 tilewise", "q2 Q0 c 1 2 tilewise", "q2 Q0 a 2 1 tilewise"),
    ]
    assert qrels.read_text().splitlines() == ["q1 0 b 1", "q2 0 a 2", "q2 0 c 0"]


def test_the_layout_of_beir(tmp_path):
    right, grades = torch.tensor([[1, -1], [0, 2]]), torch.tensor([[1, 0], [2, 0]])
    write_beir(tmp_path, ["q1", "q2"], ["a", "b", "c"], ["how\tis it", "caf\u00e9"], ["x", "y", "z"], right, grades)
    read = [
        [json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()] for n in ("queries", "corpus")
    ]
    assert read[0] == [{"_id": "q1", "text": "how\tis it"}, {"_id": "q2", "text": "caf\u00e9"}]
    assert read[1] == [{"_id": name, "title": "", "text": text} for name, text in zip("abc", "xyz", strict=True)]
    assert [line.split("\t") for line in (tmp_path / "qrels" / "test.tsv").read_text().splitlines()] == [
        *(["query-id", "corpus-id", "score"], ["q1", "b", "1"], ["q2", "a", "2"], ["q2", "c", "0"]),
    ]
