"""The CUDA model path: Triton kernels, CUDA graphs of whole steps, the draft's tree as one graph.

Importing a kernel module imports Triton; this package itself imports nothing.
"""
