"""What a GPU can do, from its datasheet."""

from dataclasses import dataclass, replace
from typing import Any

#: The engine's and PyTorch's share of the memory; the rest goes to fragmentation and to other users of the GPU.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class GpuType:
    """Peak figures. GB are 10^9 bytes; `bf16_tflops` are dense, with fp32 sums; `link_gb_s` goes one way to other GPUs."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    link_gb_s: float

    @property
    def usable_bytes(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory_gb * 1e9 * USABLE_SHARE


#: NVIDIA's datasheets: A100 80GB SXM, H100 SXM and H200 SXM (NVLink: 600 and 900 GB/s both ways together), L4 (PCIe 4.0 x16,
#: 32 GB/s each way); "NVIDIA Ada GPU Architecture" for the RTX 4090. Figures given there "with sparsity" are halved.
GPUS = {
    "a100-80g": GpuType("A100-80G", 80, 2039, 312, 300),
    "h100": GpuType("H100", 80, 3350, 989, 450),
    "h200": GpuType("H200", 141, 4800, 989, 450),
    "l4": GpuType("L4", 24, 300, 121, 32),
    "rtx4090": GpuType("RTX 4090", 24, 1008, 165, 32),
}


def gpu_of(
    name: str, *, memory_gb: float | None = None, bandwidth_gb_s: float | None = None, bf16_tflops: float | None = None,
    link_gb_s: float | None = None,
) -> GpuType:  # fmt: skip
    """The GPU of that name, with the figures that are given in place of its own.

    Raises:
        ValueError: an unknown name, or a figure that is not positive.
    """
    key = name.lower().replace(" ", "").replace("_", "-").replace("rtx-", "rtx")
    given = {
        "memory_gb": memory_gb, "bandwidth_gb_s": bandwidth_gb_s, "bf16_tflops": bf16_tflops, "link_gb_s": link_gb_s
    }  # fmt: skip
    for field, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{field}={value:g}: must be a number above 0, or left out for the datasheet's figure")
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if key not in GPUS:
        if len(changes) == len(given):
            return GpuType(name, **changes)
        raise ValueError(
            f"gpu={name!r}: known are {list(GPUS)}; for another one give all of {list(given)}, as in memory_gb=48"
        )
    return replace(GPUS[key], **changes)
