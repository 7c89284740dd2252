"""Peak performance of GPUs: dense matrix products, FLOP/s, from their makers' data sheets.

Without sparsity, at boost clocks, for the full chip. A GPU that is not here has no known peak: None, never a guess from a
similar name. tf32 counts where torch.set_float32_matmul_precision allows it for fp32. Consumer GPUs with sums in fp32, which is half of what
their makers print for sums in fp16. No figure here was measured by this project.

The sources beside the figures are where they stand, not pages that were open when they were written. On 2026-11-24 these were compared with copies of
data sheets and with tables of other projects, and agree: T4, V100-SXM2, A40, A100, RTX A6000, RTX 4090, 4080 SUPER and 4070 Ti (fp32), H100 80GB HBM3
and B200 (bf16). For A10G such tables disagree (62.5, 70 and 125 TFLOP/s in bf16). The others were compared with nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = 1e12

# name as the driver gives it (whole, without the maker): {precision: TFLOP/s}, and where that stands
_TABLE: tuple[tuple[str, Mapping[str, float], str], ...] = (
    (r"B200", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500}, "HGX B200 data sheet"),
    (r"B300.*", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500}, "HGX B300 data sheet"),
    (
        r"GB[23]00",
        {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000},
        "GB200 and GB300 NVL72 data sheets, by 72",
    ),
    (
        r"GH200 .*|H200|H100 80GB HBM3",
        {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
        "H100, H200 and GH200 data sheets",
    ),
    (r"H100 PCIe", {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513}, "H100 data sheet"),
    (
        r"H100 NVL|H200 NVL",
        {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1671},
        "H100 NVL and H200 NVL data sheets",
    ),
    (r"H20", {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296}, "H20 data sheet"),
    (
        r"A[18]00[- ](?:SXM4|SXM|PCIE|PCIe|80GB).*",
        {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
        "A100 and A800 data sheets",
    ),
    (r"A30", {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165}, "A30 data sheet"),
    (r"A40", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}, "A40 data sheet"),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}, "A10 data sheet"),
    (r"A10G", {"fp32": 31.5, "tf32": 35, "bf16": 70, "fp16": 70}, "A10G data sheet"),
    (r"A16", {"fp32": 4.5, "tf32": 9, "bf16": 17.9, "fp16": 17.9}, "A16 data sheet, by 4"),
    (r"A2", {"fp32": 4.5, "tf32": 9, "bf16": 18, "fp16": 18}, "A2 data sheet"),
    (r"RTX A6000", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}, "RTX A6000 data sheet"),
    (r"RTX A5500", {"fp32": 34.1, "tf32": 68.2, "bf16": 136.4, "fp16": 136.4}, "RTX A5500 data sheet"),
    (r"RTX A5000", {"fp32": 27.8, "tf32": 55.6, "bf16": 111.1, "fp16": 111.1}, "RTX A5000 data sheet"),
    (r"RTX A4000", {"fp32": 19.2, "tf32": 38.3, "bf16": 76.7, "fp16": 76.7}, "RTX A4000 data sheet"),
    (r"L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733}, "L40S data sheet"),
    (r"L40", {"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362}, "L40 data sheet"),
    (r"L20", {"fp32": 59.8, "tf32": 59.8, "bf16": 119.5, "fp16": 119.5, "fp8": 239}, "L20 data sheet"),
    (r"L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5}, "L4 data sheet"),
    (
        r"RTX 6000 Ada Generation",
        {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5},
        "RTX 6000 Ada data sheet",
    ),
    (
        r"RTX 5000 Ada Generation",
        {"fp32": 65.3, "tf32": 130.6, "bf16": 261.1, "fp16": 261.1, "fp8": 522.2},
        "RTX 5000 Ada data sheet",
    ),
    (
        r"GeForce RTX 5090",
        {"fp32": 104.8, "tf32": 104.8, "bf16": 209.6, "fp16": 209.6, "fp8": 419.2},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5080",
        {"fp32": 56.3, "tf32": 56.3, "bf16": 112.6, "fp16": 112.6, "fp8": 225.2},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5070 Ti",
        {"fp32": 43.9, "tf32": 43.9, "bf16": 87.8, "fp16": 87.8, "fp8": 175.6},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5070",
        {"fp32": 30.9, "tf32": 30.9, "bf16": 61.8, "fp16": 61.8, "fp8": 123.6},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5060 Ti",
        {"fp32": 23.7, "tf32": 23.7, "bf16": 47.4, "fp16": 47.4, "fp8": 94.8},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5060",
        {"fp32": 19.2, "tf32": 19.2, "bf16": 38.4, "fp16": 38.4, "fp8": 76.8},
        "RTX Blackwell white paper",
    ),
    (r"GeForce RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}, "Ada white paper"),
    (
        r"GeForce RTX 4080 SUPER",
        {"fp32": 52.2, "tf32": 52.2, "bf16": 104.4, "fp16": 104.4, "fp8": 208.8},
        "Ada white paper",
    ),
    (r"GeForce RTX 4080", {"fp32": 48.7, "tf32": 48.7, "bf16": 97.4, "fp16": 97.4, "fp8": 194.8}, "Ada white paper"),
    (
        r"GeForce RTX 4070 Ti SUPER",
        {"fp32": 44.1, "tf32": 44.1, "bf16": 88.2, "fp16": 88.2, "fp8": 176.4},
        "Ada white paper",
    ),
    (r"GeForce RTX 4070 Ti", {"fp32": 40.1, "tf32": 40.1, "bf16": 80.2, "fp16": 80.2, "fp8": 160.4}, "Ada white paper"),
    (r"GeForce RTX 4070 SUPER", {"fp32": 35.5, "tf32": 35.5, "bf16": 71, "fp16": 71, "fp8": 142}, "Ada white paper"),
    (r"GeForce RTX 4070", {"fp32": 29.1, "tf32": 29.1, "bf16": 58.2, "fp16": 58.2, "fp8": 116.4}, "Ada white paper"),
    (r"GeForce RTX 4060 Ti", {"fp32": 22.1, "tf32": 22.1, "bf16": 44.2, "fp16": 44.2, "fp8": 88.4}, "Ada white paper"),
    (r"GeForce RTX 4060", {"fp32": 15.1, "tf32": 15.1, "bf16": 30.2, "fp16": 30.2, "fp8": 60.4}, "Ada white paper"),
    (r"GeForce RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}, "GA102 white paper"),
    (r"GeForce RTX 3090 Ti", {"fp32": 40, "tf32": 40, "bf16": 80, "fp16": 80}, "GA102 white paper"),
    (r"GeForce RTX 3080 Ti", {"fp32": 34.1, "tf32": 34.1, "bf16": 68.2, "fp16": 68.2}, "GA102 white paper"),
    (r"GeForce RTX 3070 Ti", {"fp32": 21.7, "tf32": 21.7, "bf16": 43.4, "fp16": 43.4}, "GA102 white paper"),
    (r"GeForce RTX 3070", {"fp32": 20.3, "tf32": 20.3, "bf16": 40.6, "fp16": 40.6}, "GA102 white paper"),
    (r"GeForce RTX 3060 Ti", {"fp32": 16.2, "tf32": 16.2, "bf16": 32.4, "fp16": 32.4}, "GA102 white paper"),
    (r"GeForce RTX 2080 Ti", {"fp32": 13.4, "fp16": 53.8}, "Turing white paper"),
    (r"TITAN RTX|Quadro RTX [68]000", {"fp32": 16.3, "fp16": 130.5}, "Turing white paper"),
    (r"V100-SXM2-.*", {"fp32": 15.7, "fp16": 125}, "V100 data sheet"),
    (r"V100S-PCIE-.*", {"fp32": 16.4, "fp16": 130}, "V100S data sheet"),
    (r"V100-PCIE-.*", {"fp32": 14, "fp16": 112}, "V100 data sheet"),
    (r"P100-SXM2-.*", {"fp32": 10.6, "fp16": 21.2}, "P100 data sheet"),
    (r"P100-PCIE-.*", {"fp32": 9.3, "fp16": 18.7}, "P100 data sheet"),
    (r"T4", {"fp32": 8.1, "fp16": 65}, "T4 data sheet"),
    (r"Instinct MI355X.*", {"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2}, "MI355X data sheet"),
    (r"Instinct MI350X.*", {"fp32": 144.2, "bf16": 2306.9, "fp16": 2306.9, "fp8": 4613.7}, "MI350X data sheet"),
    (
        r"Instinct MI300X.*|Instinct MI325X.*",
        {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        "MI300X and MI325X data sheets",
    ),
    (r"Instinct MI300A.*", {"fp32": 122.6, "bf16": 980.6, "fp16": 980.6, "fp8": 1961.2}, "MI300A data sheet"),
    # torch counts each half of an MI250 as a GPU
    (r"Instinct MI250X.*", {"fp32": 47.85, "bf16": 191.5, "fp16": 191.5}, "MI250X data sheet, by 2"),
    (r"Instinct MI250", {"fp32": 45.25, "bf16": 181, "fp16": 181}, "MI250 data sheet, by 2"),
    (r"Instinct MI210", {"fp32": 45.3, "bf16": 181, "fp16": 181}, "MI210 data sheet"),
    (r"Instinct MI100", {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}, "MI100 data sheet"),
    (r"Radeon PRO W7900.*", {"fp32": 61.3, "bf16": 122.6, "fp16": 122.6}, "AMD's product page"),
    (r"Radeon PRO W7800", {"fp32": 45.2, "bf16": 90.5, "fp16": 90.5}, "AMD's product page"),
    (r"Radeon RX 7900 XTX", {"fp32": 61.4, "bf16": 122.8, "fp16": 122.8}, "AMD's product page"),
    (r"Radeon RX 9070 XT", {"fp32": 48.7, "bf16": 195, "fp16": 195, "fp8": 389}, "AMD's product page"),
)
_MAKER = re.compile(r"^(?:NVIDIA|AMD|Tesla)\s+", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one GPU of this name in `precision` (fp32, tf32, bf16, fp16, fp8); None when it is not in the table."""
    found = _find(device_name)
    teraflops = None if found is None else found[0].get(precision)
    return None if teraflops is None else teraflops * _T


def peak_source(device_name: str) -> str | None:
    """Where the figures of a GPU of this name stand; None when it is not in the table."""
    found = _find(device_name)
    return None if found is None else found[1]


def _find(device_name: str) -> tuple[Mapping[str, float], str] | None:
    name = _MAKER.sub("", _MAKER.sub("", device_name.strip()))
    if "MIG" in name:
        return None
    return next(
        ((rates, source) for pattern, rates, source in _TABLE if re.fullmatch(pattern, name, re.IGNORECASE)), None
    )
