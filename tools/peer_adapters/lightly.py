"""lightly's `NTXentLoss`, in a process group of one rank.

Without a group, gather_distributed=True is refused here, while lightly computes the loss of one process.
"""

import numpy
import torch.distributed as dist
from tools.peer_adapters.stand_in import module

from tilewise.integrations.lightly import NTXentLoss

numpy.random.seed(0)  # the tests set no seed, and their tolerance is a few roundings of float32
module("lightly", loss=module("lightly.loss", NTXentLoss=NTXentLoss))
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
