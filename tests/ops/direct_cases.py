"""Which losses form their gradients in forward, and the options that say when: for the tests of it."""

import tilewise as tw

EARLY = tw.TileOptions(gradients="forward")
LATE = tw.TileOptions(gradients="backward")
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_ignoring_a_class", "cross_entropy_softcap", "cross_entropy_z_loss", "cross_entropy_shift"),
]
FEW = ["siglip", "info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_z_loss"]
