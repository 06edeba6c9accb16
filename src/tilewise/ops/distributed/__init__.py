"""Calls over a process group."""
