"""Triton kernels of the torch tier, for CUDA: products with packed blocks, attention over pages, fused small steps.

Each kernel lies beside its wrapper, which checks what the kernel takes for granted. With ``TRITON_INTERPRET=1`` they
run on the CPU, slowly: so they are tested.
"""
