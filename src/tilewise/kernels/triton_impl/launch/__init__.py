"""How kernels are launched: checked arguments, recorded launches, launches through the driver."""
