"""The backend of plain PyTorch: any device with float64, any floating type."""
