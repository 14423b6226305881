"""The indexer's operations as Triton kernels on NVIDIA GPUs; on CPU tensors in Triton's interpreter."""

from portable_indexer.backends.triton_common.backend import TritonBackend
from portable_indexer.backends.triton_cuda import launch


class TritonCuda(TritonBackend):
    """The shared kernels with NVIDIA's launch choices."""

    name = "triton_cuda"
    vendor = "nvidia"
    launch = launch
