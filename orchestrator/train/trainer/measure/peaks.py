"""Peak performance of GPUs: dense matrix products, FLOP/s, from documents of their makers.

Without sparsity, at boost clocks, for the full chip. A GPU that is not here has no known peak: None, never a guess from a
similar name. tf32 counts where torch.set_float32_matmul_precision allows it for fp32. Figures of consumer GPUs are with sums in fp32: half of what
their makers print for sums in fp16 (and an eighth of the AI TOPS of the RTX 40: fp8, sums in fp16, sparse). No figure here was measured by this project.

Each figure has its document, with the maker's address of it where one is known. The documents themselves could not be opened here. On 2026-11-24 the
figures of ``_COMPARED`` were compared with quotations of those documents elsewhere, and agree (some in one precision only); for the rest no quotation was found.
Quotations of A10G's fp32 give 31.5 and 35.

    python -m orchestrator.train.trainer.measure.peaks [NAME]

prints the table, or the source of one GPU's figures.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_T = 1e12

_NVIDIA = "https://www.nvidia.com"
_IMAGES = "https://images.nvidia.com"
_STATIONS = f"{_NVIDIA}/content/dam/en-zz/Solutions/products/workstations"
_AMD = "https://www.amd.com"
_INSTINCT = f"{_AMD}/content/dam/amd/en/documents/instinct-tech-docs"
_INTEL = "https://www.intel.com/content/www/us/en/products/sku"
_BRIEFS = f"{_AMD}/content/dam/amd/en/documents/instinct-business-docs/product-briefs"

# the maker's address of a document
_ADDRESSES: Mapping[str, str] = {
    "HGX B200 data sheet": f"{_NVIDIA}/en-us/data-center/hgx/",
    "HGX B300 data sheet": f"{_NVIDIA}/en-us/data-center/hgx/",
    "GB200 and GB300 NVL72 data sheets, by 72": f"{_NVIDIA}/en-us/data-center/gb200-nvl72/",
    "H100, H200 and GH200 data sheets": f"{_NVIDIA}/en-us/data-center/h100/",
    "H100 data sheet": f"{_NVIDIA}/en-us/data-center/h100/",
    "H100 NVL and H200 NVL data sheets": f"{_NVIDIA}/en-us/data-center/h200/",
    "A100 and A800 data sheets": f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    "A30 data sheet": f"{_NVIDIA}/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf",
    "A40 data sheet": f"{_IMAGES}/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
    "A10 data sheet": f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
    "A10G data sheet": "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    "A16 data sheet, by 4": f"{_IMAGES}/content/Solutions/data-center/vgpu-a16-datasheet.pdf",
    "A2 data sheet": f"{_NVIDIA}/content/dam/en-zz/solutions/data-center/a2/pdf/a2-datasheet.pdf",
    "RTX A6000 data sheet": f"{_STATIONS}/nvidia-rtx-a6000-datasheet.pdf",
    "RTX A5000 data sheet": f"{_STATIONS}/nvidia-rtx-a5000-datasheet.pdf",
    "RTX A4000 data sheet": f"{_STATIONS}/nvidia-rtx-a4000-datasheet.pdf",
    "L40S data sheet": "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    "L4 data sheet": f"{_NVIDIA}/en-us/data-center/l4/",
    "RTX 6000 Ada data sheet": f"{_NVIDIA}/en-us/products/workstations/rtx-6000/",
    "RTX PRO 6000 Blackwell data sheet, AI TOPS by 8": f"{_NVIDIA}/content/dam/en-zz/Solutions/data-center/rtx-pro-6000-blackwell-workstation-edition/workstation-blackwell-rtx-pro-6000-workstation-edition-nvidia-us-3519208-web.pdf",
    "RTX Blackwell white paper": f"{_IMAGES}/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    "Ada white paper": f"{_IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    "RTX 4080 family product page, AI TOPS by 8": f"{_NVIDIA}/en-us/geforce/graphics-cards/40-series/rtx-4080-family/",
    "RTX 4070 family product page, AI TOPS by 8": f"{_NVIDIA}/en-us/geforce/graphics-cards/40-series/rtx-4070-family/",
    "GA102 white paper": f"{_NVIDIA}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
    "Turing white paper": f"{_IMAGES}/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf",
    "V100 data sheet": f"{_IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    "V100S data sheet": f"{_IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    "P100 data sheet": f"{_IMAGES}/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf",
    "T4 data sheet": f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
    "MI355X data sheet": f"{_INSTINCT}/product-briefs/amd-instinct-mi355x-gpu-brochure.pdf",
    "MI350X data sheet": f"{_INSTINCT}/product-briefs/amd-instinct-mi350x-gpu-brochure.pdf",
    "MI300X and MI325X data sheets": f"{_INSTINCT}/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
    "MI300A data sheet": f"{_INSTINCT}/data-sheets/amd-instinct-mi300a-data-sheet.pdf",
    "MI250X data sheet, by 2": f"{_AMD}/en/products/accelerators/instinct/mi200/mi250x.html",
    "MI250 data sheet, by 2": f"{_AMD}/en/products/accelerators/instinct/mi200/mi250.html",
    "MI210 data sheet": f"{_BRIEFS}/instinct-mi210-brochure.pdf",
    "MI100 data sheet": f"{_BRIEFS}/instinct-mi100-brochure.pdf",
    "W7900 product page": f"{_AMD}/en/products/graphics/workstations/radeon-pro/w7000-series/amd-radeon-pro-w7900.html",
    "W7800 product page": f"{_AMD}/en/products/graphics/workstations/radeon-pro/w7000-series/amd-radeon-pro-w7800.html",
    "RX 7900 XTX product page": f"{_AMD}/en/products/graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx.html",
    "Intel's specifications of the Max 1100": f"{_INTEL}/232876/intel-data-center-gpu-max-1100/specifications.html",
    "Intel's specifications of the B580": f"{_INTEL}/241598/intel-arc-b580-graphics/specifications.html",
    "RX 9070 XT product page": f"{_AMD}/en/products/graphics/desktops/radeon/9000-series/amd-radeon-rx-9070xt.html",
}

# name as the driver gives it (whole, without the maker): {precision: TFLOP/s}, and the document
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
        r"RTX PRO 6000 Blackwell Workstation Edition",
        {"fp32": 125, "tf32": 250, "bf16": 500, "fp16": 500, "fp8": 1000},
        "RTX PRO 6000 Blackwell data sheet, AI TOPS by 8",
    ),
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
        {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5080",
        {"fp32": 56.3, "tf32": 56.3, "bf16": 112.6, "fp16": 112.6, "fp8": 225.2},
        "RTX Blackwell white paper",
    ),
    (
        r"GeForce RTX 5070 Ti",
        {"fp32": 43.9, "tf32": 43.9, "bf16": 87.9, "fp16": 87.9, "fp8": 175.8},
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
        "RTX 4080 family product page, AI TOPS by 8",
    ),
    (r"GeForce RTX 4080", {"fp32": 48.7, "tf32": 48.7, "bf16": 97.4, "fp16": 97.4, "fp8": 194.8}, "Ada white paper"),
    (
        r"GeForce RTX 4070 Ti SUPER",
        {"fp32": 44.1, "tf32": 44.1, "bf16": 88.2, "fp16": 88.2, "fp8": 176.4},
        "RTX 4070 family product page, AI TOPS by 8",
    ),
    (r"GeForce RTX 4070 Ti", {"fp32": 40.1, "tf32": 40.1, "bf16": 80.2, "fp16": 80.2, "fp8": 160.4}, "Ada white paper"),
    (
        r"GeForce RTX 4070 SUPER",
        {"fp32": 35.5, "tf32": 35.5, "bf16": 71, "fp16": 71, "fp8": 142},
        "RTX 4070 family product page, AI TOPS by 8",
    ),
    (
        r"GeForce RTX 4070",
        {"fp32": 29.1, "tf32": 29.1, "bf16": 58.2, "fp16": 58.2, "fp8": 116.4},
        "RTX 4070 family product page, AI TOPS by 8",
    ),
    (
        r"GeForce RTX 4060 Ti",
        {"fp32": 22.1, "tf32": 22.1, "bf16": 44.2, "fp16": 44.2, "fp8": 88.4},
        "RTX 4060 family product page, AI TOPS by 8",
    ),
    (
        r"GeForce RTX 4060",
        {"fp32": 15.1, "tf32": 15.1, "bf16": 30.2, "fp16": 30.2, "fp8": 60.4},
        "RTX 4060 family product page, AI TOPS by 8",
    ),
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
    (r"Instinct MI350X.*", {"fp32": 144.2, "bf16": 2309.6, "fp16": 2309.6, "fp8": 4614}, "MI350X data sheet"),
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
    (r"Radeon PRO W7900.*", {"fp32": 61.3, "bf16": 122.6, "fp16": 122.6}, "W7900 product page"),
    (r"Radeon PRO W7800", {"fp32": 45.2, "bf16": 90.5, "fp16": 90.5}, "W7800 product page"),
    (r"Radeon RX 7900 XTX", {"fp32": 61.4, "bf16": 122.8, "fp16": 122.8}, "RX 7900 XTX product page"),
    (r"Radeon RX 9070 XT", {"fp32": 48.7, "bf16": 195, "fp16": 195, "fp8": 389}, "RX 9070 XT product page"),
    (
        r"Intel\(R\) Data Center GPU Max 1100",
        {"fp32": 22.2, "bf16": 355.5, "fp16": 355.5},
        "Intel's specifications of the Max 1100",
    ),
    (
        r"Intel\(R\) Arc\(TM\) B580 Graphics",
        {"fp32": 13.7, "bf16": 116.5, "fp16": 116.5},
        "Intel's specifications of the B580",
    ),
)
# rows whose figures agree with a quotation of the document, or were derived in the same way from quoted ones
_COMPARED = frozenset(
    {
        r"B200", r"GH200 .*|H200|H100 80GB HBM3", r"H100 PCIe", r"H100 NVL|H200 NVL", r"A[18]00[- ](?:SXM4|SXM|PCIE|PCIe|80GB).*",
        r"A40", r"A10", r"A10G", r"RTX PRO 6000 Blackwell Workstation Edition", r"RTX 6000 Ada Generation",
        r"RTX A6000", r"RTX A5000", r"RTX A4000", r"L40S", r"L40", r"L4", r"GeForce RTX 5090", r"GeForce RTX 5080",
        r"GeForce RTX 5070 Ti", r"GeForce RTX 4090", r"GeForce RTX 4080 SUPER", r"GeForce RTX 4080", r"GeForce RTX 4070 Ti SUPER", r"GeForce RTX 4070 Ti",
        r"GeForce RTX 4070 SUPER", r"GeForce RTX 4070", r"GeForce RTX 4060 Ti", r"GeForce RTX 4060", r"GeForce RTX 3090",
        r"GeForce RTX 3090 Ti", r"GeForce RTX 3080 Ti", r"GeForce RTX 3070", r"V100-SXM2-.*", r"V100S-PCIE-.*", r"V100-PCIE-.*", r"P100-PCIE-.*", r"T4",
        r"Instinct MI355X.*", r"Instinct MI350X.*", r"Instinct MI300X.*|Instinct MI325X.*", r"Instinct MI300A.*", r"Instinct MI250X.*", r"Instinct MI210",
        r"Radeon PRO W7900.*", r"Radeon PRO W7800", r"Radeon RX 7900 XTX", r"Radeon RX 9070 XT", r"Intel\(R\) Data Center GPU Max 1100",
        r"Intel\(R\) Arc\(TM\) B580 Graphics",
    }
)  # fmt: skip
_MAKER = re.compile(r"^(?:NVIDIA|AMD|Tesla)\s+", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s of a GPU in `precision` (fp32, tf32, bf16, fp16, fp8); None when it is not in the table."""
    found = _find(device_name)
    teraflops = None if found is None else found[0].get(precision)
    return None if teraflops is None else teraflops * _T


def peak_source(device_name: str) -> str | None:
    """Return the document with a GPU's figures, its address, and whether quotations of it agree; None when the name is not in the table."""
    found = _find(device_name)
    return None if found is None else _source(found[1], compared=found[2])


def _source(document: str, *, compared: bool) -> str:
    address = f" ({_ADDRESSES[document]})" if document in _ADDRESSES else ""
    return f"{document}{address}, {'agrees with quotations of it' if compared else 'not compared with it'}"


def table() -> Iterator[str]:
    """Yield a line for each row: its names as a regular expression, TFLOP/s by precision, and their source."""
    for pattern, rates, document in _TABLE:
        shown = ", ".join(f"{precision} {rate:g}" for precision, rate in rates.items())
        yield f"{pattern}: {shown} TFLOP/s; {_source(document, compared=pattern in _COMPARED)}"


def _find(device_name: str) -> tuple[Mapping[str, float], str, bool] | None:
    name = _MAKER.sub("", _MAKER.sub("", device_name.strip()))
    if "MIG" in name:
        return None
    return next(
        (
            (rates, document, pattern in _COMPARED)
            for pattern, rates, document in _TABLE
            if re.fullmatch(pattern, name, re.IGNORECASE)
        ),
        None,
    )


if __name__ == "__main__":
    named = sys.argv[1:]
    lines = [f"{name}: {peak_source(name) or 'not in the table'}" for name in named] or table()
    sys.stdout.writelines(f"{line}\n" for line in lines)
