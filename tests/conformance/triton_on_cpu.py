"""Let vLLM's second model runner run on a CPU: Triton's interpreter, made to look like a backend for CPUs. For tests only.

    python triton_on_cpu.py SCRIPT ARGUMENTS ...

The registry's Triton has no backend for CPUs, and vLLM asks for one. Its interpreter runs kernels on tensors in host
memory, slowly. One defect of it is worked around: a mask made of a tensor and a scalar condition has an integer type.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter


class Driver:
    """As much of a driver as vLLM and Triton look at."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def map_python_to_cpp_type(self, kind):
        return kind


def install():
    """Make Triton take the CPU for a device."""
    backends["cpu"] = Backend(compiler=None, driver=Driver)
    triton.runtime.driver.set_active(Driver())
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, boolean(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(self, at, value, boolean(mask), *rest)


def boolean(mask):
    """Return a mask as booleans."""
    if mask.data.dtype == np.bool_:
        return mask
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
