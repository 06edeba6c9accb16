"""Each module puts this package's loss in the place of a peer's, for `tools/peers.py`. The peer's tests import it first."""
