"""The torch backend: plain PyTorch, on any device with float64 and in any floating type."""
