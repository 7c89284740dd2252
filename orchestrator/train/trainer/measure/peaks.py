"""Peak performance of GPUs: dense matrix products, FLOP/s, from their makers' data sheets.

Without sparsity, at boost clocks, for the full chip. A GPU that is missing has no known peak: None, never a guess from
a similar name. tf32 counts where torch.set_float32_matmul_precision allows it for fp32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = 1e12

# name as reported by the driver (whole, without the maker): {precision: TFLOP/s}
_TABLE: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"B200", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500}),
    (r"GH200 .*|H200|H100 80GB HBM3", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}),
    (r"H100 PCIe", {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513}),
    (r"H100 NVL|H200 NVL", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1671}),
    (r"H20", {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296}),
    (r"A[18]00[- ](?:SXM4|SXM|PCIE|PCIe|80GB).*", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    (r"A30", {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165}),
    (r"A40", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}),
    (r"RTX A6000", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}),
    (r"L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733}),
    (r"L40", {"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362}),
    (r"L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5}),
    (r"RTX 6000 Ada Generation", {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5}),
    (r"GeForce RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}),
    (r"GeForce RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    (r"V100-SXM2-.*", {"fp32": 15.7, "fp16": 125}),
    (r"V100-PCIE-.*", {"fp32": 14, "fp16": 112}),
    (r"T4", {"fp32": 8.1, "fp16": 65}),
    (r"Instinct MI300X.*|Instinct MI325X.*", {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}),
    (r"Instinct MI250X.*", {"fp32": 47.85, "bf16": 191.5, "fp16": 191.5}),  # torch counts each half as a GPU
)
_MAKER = re.compile(r"^(?:NVIDIA|AMD|Tesla)\s+")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s of one GPU of this name in `precision` (fp32, tf32, bf16, fp16, fp8); None when it is not in the table."""
    name = _MAKER.sub("", _MAKER.sub("", device_name.strip()))
    for pattern, by_precision in _TABLE:
        if re.fullmatch(pattern, name):
            teraflops = by_precision.get(precision)
            return None if teraflops is None or "MIG" in name else teraflops * _T
    return None
