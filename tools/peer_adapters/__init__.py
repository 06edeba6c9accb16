"""Each module puts the losses of this package in the place of a peer's; the peer's tests import it first."""
