"""Losses, one file each: the function, then its Module."""
