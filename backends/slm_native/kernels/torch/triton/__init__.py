"""Triton kernels of the torch tier, for CUDA: products with packed blocks, attention over pages, fused small steps.

Each kernel is next to its wrapper, which checks the kernel's assumptions. With ``TRITON_INTERPRET=1`` kernels run
(slowly) on the CPU, for tests.
"""
