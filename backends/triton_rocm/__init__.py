"""The indexer's operations as Triton kernels on AMD GPUs; on CPU tensors in Triton's interpreter."""

from portable_indexer.backends.triton_common.backend import TritonBackend
from portable_indexer.backends.triton_rocm import launch

_MISCOMPILES = "Triton 3.7 is reported to miscompile pipelined loops on gfx950; use 3.6 or 3.9"


class TritonRocm(TritonBackend):
    """The shared kernels with AMD's launch choices."""

    name = "triton_rocm"
    vendor = "amd"
    launch = launch
    broken = {("gfx950", (3, 7)): _MISCOMPILES}  # noqa: RUF012
