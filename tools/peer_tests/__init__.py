"""Tests that run a peer's code with its losses and with ours, where the peer has no test of its own."""
