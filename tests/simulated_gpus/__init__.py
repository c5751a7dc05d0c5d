"""GPUs that are not there, for a torch without CUDA: tensors that say that they are on one. Their
numbers lie in host memory, where the operations on them are computed.

They refuse what a GPU refuses: operands on two devices, and whatever waits for the host while a
graph is captured. A graph repeats the operations of its capture, on the same tensors. They compute
at once, so a stream that is not waited for does not show. They have neither a GPU's speed nor its
memory, random numbers or kernels, no NCCL, and nothing compiled.
"""
