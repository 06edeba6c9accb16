"""Tools for a machine: `tilewise tune` and `tilewise doctor`."""
