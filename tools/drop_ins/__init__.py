"""Compares the drop-ins with the packages whose signatures they have."""
