"""Kernels compiled for GPUs where there is none, and what their machine code shows: registers, spills, widths and bytes of accesses.

Triton compiles for a target that a driver names; the driver here names one and has no device. The wheel brings `ptxas` and `cuobjdump`, so
NVIDIA's machine code can be read; of AMD's the assembly text is read. Bytes are counted as issued: every load instruction of a program
times its width times the program's threads, over the rows that the program does. Threads that load what their neighbours load count too.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def __init__(self, target: Any) -> None:
        self.target = target

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return self.target.backend, self.target.arch

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Code:
    """What one compiled kernel is made of.

    Attributes:
        registers: per thread.
        spills: bytes of stack on NVIDIA, spilled registers on AMD.
        load_bytes, store_bytes: of global memory, issued per row.
        loads, stores: instructions by width in bytes.
        kv_loads: those of the loads whose address begins at the kernel's first argument, by PTX; on AMD not counted.
        fused_multiply_adds: FFMA and its kin; on AMD not counted.
        instructions: in all; on AMD not counted.
    """

    registers: int
    spills: int
    load_bytes: float
    store_bytes: float
    loads: dict[int, int]
    stores: dict[int, int]
    fused_multiply_adds: int
    instructions: int
    kv_loads: dict[int, int] = field(default_factory=dict)


def code_of(compiled: Any, *, rows: int, warps: int) -> Code:
    """Read a compiled kernel of which a program does `rows` rows with `warps` warps (waves)."""
    if "amdgcn" in compiled.asm:
        return _amd_code(compiled.asm["amdgcn"], rows, 64 * warps)
    usage, code = disassembled(compiled)
    loads = Counter(_width(each) for each in re.findall(r"\bLDG(\S*)", code))
    stores = Counter(_width(each) for each in re.findall(r"\bSTG(\S*)", code))
    local = len(re.findall(r"\b(?:LDL|STL)\b", code))
    return Code(
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        spills=int(re.findall(r"STACK:(\d+)", usage)[0]) + local,
        load_bytes=_bytes(loads) * 32 * warps / rows,
        store_bytes=_bytes(stores) * 32 * warps / rows,
        loads=dict(sorted(loads.items())),
        stores=dict(sorted(stores.items())),
        fused_multiply_adds=len(re.findall(r"\bFFMA\b", code)),
        instructions=len(re.findall(r"/\*[0-9a-f]{4}\*/", code)),
        kv_loads=loads_from(compiled.asm["ptx"], 0),
    )


def loads_from(ptx: str, parameter: int) -> dict[int, int]:
    """Load instructions by width in bytes whose address was computed from a kernel's parameter, followed from register to register."""
    begun: dict[str, set[int]] = {}
    found: Counter[int] = Counter()
    for statement in re.sub(r"//[^\n]*", "", ptx).split(";"):
        match = _STATEMENT.search(statement)
        if match is None:
            continue
        opcode, due, rest = match["opcode"], re.findall(r"%\w+", match["into"]), match["rest"]
        origins = set().union(*(begun.get(register, set()) for register in re.findall(r"%\w+", rest)))
        if opcode.startswith("ld.param"):
            origins = {int(number) for number in re.findall(r"_param_(\d+)\b", rest)}
        elif opcode.startswith("ld."):
            if opcode.startswith("ld.global") and parameter in origins:
                found[_ptx_width(opcode)] += 1
            origins = set()  # what was loaded is no address of where it was loaded from
        begun.update(dict.fromkeys(due, origins))
    return dict(sorted(found.items()))


#: One instruction of PTX: its name, the register or registers it writes, and everything else.
_STATEMENT = re.compile(
    r"(?P<opcode>[a-z][\w.]*(?:::\w+)*[\w.:]*)\s+(?P<into>\{[^}]*\}|%\w+)\s*,(?P<rest>.*)", re.DOTALL
)


def _ptx_width(opcode: str) -> int:
    lanes, bits = re.search(r"\.v(\d)\b", opcode), re.search(r"\.[bufs](\d+)$", opcode)
    assert bits is not None, opcode
    return (int(lanes[1]) if lanes else 1) * int(bits[1]) // 8


def disassembled(compiled: Any) -> tuple[str, str]:
    """What cuobjdump says of a CUDA kernel's registers, and its machine code. FileNotFoundError where this triton ships no cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise FileNotFoundError(f"this triton ships no cuobjdump: {tool}")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run([tool, option, cubin], check=True, capture_output=True, text=True, timeout=60).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, code


def _width(suffix: str) -> int:
    """Bytes that one thread moves by an LDG or STG with these suffixes."""
    for word, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1), ("256", 32)):
        if f".{word}" in suffix:
            return width
    return 4


_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b64": 8, "b32": 4}


def _amd_code(text: str, rows: int, threads: int) -> Code:
    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", text)[0])

    def moved(kind: str) -> Counter[int]:
        found = re.findall(rf"\b(?:global|buffer|flat)_{kind}_(\w+)", text)
        return Counter(_AMD_WIDTHS.get(each, 1 if "byte" in each or each in ("u8", "i8") else 2) for each in found)

    loads, stores = moved("load"), moved("store")
    return Code(
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count") + field("sgpr_spill_count"),
        load_bytes=_bytes(loads) * threads / rows,
        store_bytes=_bytes(stores) * threads / rows,
        loads=dict(sorted(loads.items())),
        stores=dict(sorted(stores.items())),
        fused_multiply_adds=0,
        instructions=0,
    )


def _bytes(widths: Counter[int]) -> int:
    return sum(width * count for width, count in widths.items())
