"""Steps whose memory is measured, each in a process of its own: (a small one that warms up, the one that counts)."""

import torch

import tilewise as tw


def step(n, m, d, dtype, workspace_mib):
    rank = torch.randperm(m) + 1
    hidden = torch.cat([torch.ones(n, 1), 0.3 * torch.randn(n, d - 1)], 1).to(dtype).requires_grad_()
    classifier = torch.cat([-3 * rank.log()[:, None], torch.randn(m, d - 1)], 1).to(dtype).requires_grad_()
    target = torch.randint(0, m, (n,))
    options = tw.TileOptions(workspace_mib=workspace_mib, filter_tolerance=1e-2)

    def run():
        with tw.record_filtering() as report:
            loss = tw.linear_cross_entropy(hidden, classifier, target, options=options)
        grads = torch.autograd.grad(loss, [hidden, classifier])
        assert report.dense == [False]
        return grads

    return run


def measured(n, m, d, dtype="float32", workspace_mib=4):
    kind = getattr(torch, dtype)
    return step(64, 512, d, kind, 1), step(n, m, d, kind, workspace_mib)
