"""Train, mine hard negatives, train again: how much do mined negatives gain over training again without them?

python examples/mining.py             # one core: a few minutes, nothing is downloaded
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from retrieval import read_pairs
from torch import Tensor, nn

import tilewise as tw


def train(table: nn.Module, query: Tensor, document: Tensor, steps: int, mined: Tensor | None = None) -> None:
    optimizer, more = torch.optim.AdamW(table.parameters(), lr=1e-2), {}
    for rows in torch.randint(len(query), (steps, 256)):
        q, k = F.normalize(table(query[rows])), F.normalize(table(document[rows]))
        if mined is not None:  # rows of `document`, -1 for none
            hard = F.normalize(table(document[mined[rows].flatten()])).view(256, -1, q.shape[1])
            more = {"negative_keys": hard, "negative_mask": mined[rows] >= 0}
        optimizer.zero_grad()
        tw.info_nce(q, k, temperature=0.05, query_ids=rows, **more).backward()
        optimizer.step()


def measure(table: nn.Module, query: Tensor, document: Tensor, right: Tensor) -> float:
    ranks = tw.retrieval_ranks(F.normalize(table(query)), F.normalize(table(document)), right)
    return tw.retrieval_metrics(ranks)["mrr"]


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    args, results, (query, document, _) = parser.parse_args(argv), [], read_pairs()
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        new, old = torch.randperm(len(query)).tensor_split([min(500, len(query) // 5)])
        table = nn.EmbeddingBag(2**15, 256, padding_idx=0)
        train(table, query[old], document[old], args.steps)
        found = {"trained": measure(table, query[new], document, new)}
        features = (F.normalize(table(side[old])) for side in (query, document))
        mined = tw.mine_hard_negatives(*features, num_negatives=8).indices
        for name, negatives in (("trained again", None), ("with mined negatives", mined)):
            torch.manual_seed(seed)  # the same batches
            train(again := copy.deepcopy(table), query[old], document[old], args.steps, negatives)
            found[name] = measure(again, query[new], document, new)
        print(f"seed {seed}: MRR of new queries", ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        results += [found]
    gains = sorted(found["with mined negatives"] - found["trained again"] for found in results)
    print(f"gain of mined negatives: mean {sum(gains) / len(gains):+.4f}, from {gains[0]:+.4f} to {gains[-1]:+.4f}")
    return results


if __name__ == "__main__":
    main()
