"""A process group ends when it is destroyed: eager losses do not import torch's compiler, which would hold it.

`torch.distributed.nn.functional` has the default group as a default argument. If it is imported after
`init_process_group`, it holds that group for ever. The first call of a registered operator imports it. A gloo group
that `destroy_process_group` cannot end leaves threads behind. One of these may abort the process while Python exits.
"""

import subprocess
import sys

import pytest

JOB = """
import gc, sys
import torch, torch.distributed as dist
{before}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
import tilewise as tw
features = torch.eye(3, requires_grad=True)
tw.clip_loss(features, torch.eye(3), 1.0, group=group).backward()
tw.linear_cross_entropy(features, torch.eye(3), torch.arange(3)).backward()
tw.info_nce(features, torch.eye(3), torch.ones(3, 2, 3), group=group).backward()
tw.linear_token_stats(features, torch.eye(3), torch.arange(3), group=group)
tw.retrieval_ranks(features, torch.eye(3), group=group)
assert "torch._dynamo" not in sys.modules, "a loss has imported the compiler"
dist.destroy_process_group()
gc.collect()
print("held", sys.getrefcount(group) - 2)
"""


@pytest.mark.parametrize("before", ["", "import tilewise"], ids=["imported after", "imported before"])
def test_a_loss_does_not_hold_the_default_group(before):
    done = subprocess.run(
        [sys.executable, "-c", JOB.format(before=before)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "held 0\n", done.stdout + done.stderr[-2000:]
