"""PyTorch Metric Learning with our `NTXentLoss` and `SupConLoss`; everything else is the peer's."""

import sys

sys.path.insert(0, "src")

from pytorch_metric_learning import losses  # type: ignore[import-not-found]

from tilewise.integrations import pytorch_metric_learning as ours

losses.NTXentLoss, losses.SupConLoss = ours.NTXentLoss, ours.SupConLoss
