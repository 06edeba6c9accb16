"""Gradients without the (row, tile) entries that carry almost no probability."""
