"""GPUs to compile for where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class NoDevice:
    """A driver that names a target and has no device, so that `warmup` compiles as a launch would and runs nothing."""

    def __init__(self, target):
        self.target = target

    def is_active(self):
        return True

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.backend, self.target.arch

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def map_python_to_cpp_type(self, name):
        return name

    def get_benchmarker(self):
        return None


def inspect(compiled, folder):
    """What cuobjdump says of registers, and the machine code."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton ships no cuobjdump")
    return [
        subprocess.run([tool, option, cubin], check=True, capture_output=True, text=True, timeout=60).stdout
        for option in ("-res-usage", "-sass")
    ]
