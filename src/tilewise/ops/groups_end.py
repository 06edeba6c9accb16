"""Process groups that end when they are destroyed.

`torch.distributed.nn.functional` has the default group as a default argument, and so holds it for ever if it is
imported after `init_process_group`. The first call of an operator imports it, through `torch._dynamo`. A gloo group
that `destroy_process_group` cannot end leaves threads behind, and one of these, caught while Python shuts down, aborts
the process: a job that did all its work ends with SIGABRT, now and then.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

HOLDER = "torch.distributed.nn.functional"


def import_without_group() -> None:
    """Import the module as if no group were there yet; nothing to do if it is imported already."""
    if not dist.is_available() or HOLDER in sys.modules:
        return
    held, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        import torch.distributed.nn.functional  # noqa: F401
    finally:
        dist.GroupMember.WORLD = held
