"""Each module puts this package's losses in the place of a peer's, whose tests import it first: see `tools/peers.py`."""
