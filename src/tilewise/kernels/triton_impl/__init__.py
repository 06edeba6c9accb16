"""The fused kernels. Nothing outside this folder imports triton."""
