"""A process group ends when it is destroyed, whatever a loss has made torch import."""

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
assert "torch._dynamo" in sys.modules, "which a loss imports; if it no longer does, this test looks at nothing"
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
