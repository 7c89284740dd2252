"""Peak performance of GPUs: dense matrix products, FLOP/s, from documents of their makers.

Without sparsity, at boost clocks, for the full chip. A GPU that is not here has no known peak: None, never a guess from a
similar name. tf32 counts where torch.set_float32_matmul_precision allows it for fp32. Figures of consumer GPUs are with sums in fp32: half of what
their makers print for sums in fp16 (and an eighth of the AI TOPS of the RTX 40: fp8, sums in fp16, sparse). No figure here was measured by this project.

Each figure has its document, with the maker's address of it where one is known. The documents themselves could not be opened here. On 2026-11-24 the
figures of the rows marked True were compared with quotations of those documents elsewhere, and agree (some in one precision only); for the rest no quotation was found.
Quotations of A10G's fp32 give 31.5 and 35.

    python -m orchestrator.train.trainer.measure.peaks [NAME]

prints the table, or the source of one GPU's figures.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

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

_PRECISIONS: Final = ("fp32", "tf32", "bf16", "fp16", "fp8")
# The name as the driver gives it (whole, without the maker), TFLOP/s in each precision (None: not supported, or not documented), the document, and
# whether quotations of the document agree. torch counts each half of an MI250 as a GPU.
_TABLE: Final[tuple[tuple[str, tuple[float | None, ...], str, bool], ...]] = (
    (r"B200", (75, 1125, 2250, 2250, 4500), "HGX B200 data sheet", True),
    (r"B300.*", (75, 1125, 2250, 2250, 4500), "HGX B300 data sheet", False),
    (r"GB[23]00", (80, 1250, 2500, 2500, 5000), "GB200 and GB300 NVL72 data sheets, by 72", False),
    (r"GH200 .*|H200|H100 80GB HBM3", (66.9, 494.7, 989.4, 989.4, 1978.9), "H100, H200 and GH200 data sheets", True),
    (r"H100 PCIe", (51.2, 378, 756, 756, 1513), "H100 data sheet", True),
    (r"H100 NVL|H200 NVL", (60, 417.5, 835.5, 835.5, 1671), "H100 NVL and H200 NVL data sheets", True),
    (r"H20", (44, 74, 148, 148, 296), "H20 data sheet", False),
    (r"A[18]00[- ](?:SXM4|SXM|PCIE|PCIe|80GB).*", (19.5, 156, 312, 312, None), "A100 and A800 data sheets", True),
    (r"A30", (10.3, 82, 165, 165, None), "A30 data sheet", False),
    (r"A40", (37.4, 74.8, 149.7, 149.7, None), "A40 data sheet", True),
    (r"A10", (31.2, 62.5, 125, 125, None), "A10 data sheet", True),
    (r"A10G", (31.5, 35, 70, 70, None), "A10G data sheet", True),
    (r"A16", (4.5, 9, 17.9, 17.9, None), "A16 data sheet, by 4", False),
    (r"A2", (4.5, 9, 18, 18, None), "A2 data sheet", False),
    (r"RTX A6000", (38.7, 77.4, 154.8, 154.8, None), "RTX A6000 data sheet", True),
    (r"RTX A5500", (34.1, 68.2, 136.4, 136.4, None), "RTX A5500 data sheet", False),
    (r"RTX A5000", (27.8, 55.6, 111.1, 111.1, None), "RTX A5000 data sheet", True),
    (r"RTX A4000", (19.2, 38.3, 76.7, 76.7, None), "RTX A4000 data sheet", True),
    (r"L40S", (91.6, 183, 362.05, 362.05, 733), "L40S data sheet", True),
    (r"L40", (90.5, 90.5, 181.05, 181.05, 362), "L40 data sheet", True),
    (r"L20", (59.8, 59.8, 119.5, 119.5, 239), "L20 data sheet", False),
    (r"L4", (30.3, 60, 121, 121, 242.5), "L4 data sheet", True),
    (r"RTX PRO 6000 Blackwell Workstation Edition", (125, 250, 500, 500, 1000), "RTX PRO 6000 Blackwell data sheet, AI TOPS by 8", True),
    (r"RTX 6000 Ada Generation", (91.1, 182.1, 364.2, 364.2, 728.5), "RTX 6000 Ada data sheet", True),
    (r"RTX 5000 Ada Generation", (65.3, 130.6, 261.1, 261.1, 522.2), "RTX 5000 Ada data sheet", False),
    (r"GeForce RTX 5090", (104.8, 104.8, 209.5, 209.5, 419), "RTX Blackwell white paper", True),
    (r"GeForce RTX 5080", (56.3, 56.3, 112.6, 112.6, 225.2), "RTX Blackwell white paper", True),
    (r"GeForce RTX 5070 Ti", (43.9, 43.9, 87.9, 87.9, 175.8), "RTX Blackwell white paper", True),
    (r"GeForce RTX 5070", (30.9, 30.9, 61.8, 61.8, 123.6), "RTX Blackwell white paper", False),
    (r"GeForce RTX 5060 Ti", (23.7, 23.7, 47.4, 47.4, 94.8), "RTX Blackwell white paper", False),
    (r"GeForce RTX 5060", (19.2, 19.2, 38.4, 38.4, 76.8), "RTX Blackwell white paper", False),
    (r"GeForce RTX 4090", (82.6, 82.6, 165.2, 165.2, 330.3), "Ada white paper", True),
    (r"GeForce RTX 4080 SUPER", (52.2, 52.2, 104.4, 104.4, 208.8), "RTX 4080 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 4080", (48.7, 48.7, 97.4, 97.4, 194.8), "Ada white paper", True),
    (r"GeForce RTX 4070 Ti SUPER", (44.1, 44.1, 88.2, 88.2, 176.4), "RTX 4070 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 4070 Ti", (40.1, 40.1, 80.2, 80.2, 160.4), "Ada white paper", True),
    (r"GeForce RTX 4070 SUPER", (35.5, 35.5, 71, 71, 142), "RTX 4070 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 4070", (29.1, 29.1, 58.2, 58.2, 116.4), "RTX 4070 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 4060 Ti", (22.1, 22.1, 44.2, 44.2, 88.4), "RTX 4060 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 4060", (15.1, 15.1, 30.2, 30.2, 60.4), "RTX 4060 family product page, AI TOPS by 8", True),
    (r"GeForce RTX 3090", (35.6, 35.6, 71, 71, None), "GA102 white paper", True),
    (r"GeForce RTX 3090 Ti", (40, 40, 80, 80, None), "GA102 white paper", True),
    (r"GeForce RTX 3080 Ti", (34.1, 34.1, 68.2, 68.2, None), "GA102 white paper", True),
    (r"GeForce RTX 3070 Ti", (21.7, 21.7, 43.4, 43.4, None), "GA102 white paper", False),
    (r"GeForce RTX 3070", (20.3, 20.3, 40.6, 40.6, None), "GA102 white paper", True),
    (r"GeForce RTX 3060 Ti", (16.2, 16.2, 32.4, 32.4, None), "GA102 white paper", False),
    (r"GeForce RTX 2080 Ti", (13.4, None, None, 53.8, None), "Turing white paper", False),
    (r"TITAN RTX|Quadro RTX [68]000", (16.3, None, None, 130.5, None), "Turing white paper", False),
    (r"V100-SXM2-.*", (15.7, None, None, 125, None), "V100 data sheet", True),
    (r"V100S-PCIE-.*", (16.4, None, None, 130, None), "V100S data sheet", True),
    (r"V100-PCIE-.*", (14, None, None, 112, None), "V100 data sheet", True),
    (r"P100-SXM2-.*", (10.6, None, None, 21.2, None), "P100 data sheet", False),
    (r"P100-PCIE-.*", (9.3, None, None, 18.7, None), "P100 data sheet", True),
    (r"T4", (8.1, None, None, 65, None), "T4 data sheet", True),
    (r"Instinct MI355X.*", (157.3, None, 2516.6, 2516.6, 5033.2), "MI355X data sheet", True),
    (r"Instinct MI350X.*", (144.2, None, 2309.6, 2309.6, 4614), "MI350X data sheet", True),
    (r"Instinct MI300X.*|Instinct MI325X.*", (163.4, None, 1307.4, 1307.4, 2614.9), "MI300X and MI325X data sheets", True),
    (r"Instinct MI300A.*", (122.6, None, 980.6, 980.6, 1961.2), "MI300A data sheet", True),
    (r"Instinct MI250X.*", (47.85, None, 191.5, 191.5, None), "MI250X data sheet, by 2", True),
    (r"Instinct MI250", (45.25, None, 181, 181, None), "MI250 data sheet, by 2", False),
    (r"Instinct MI210", (45.3, None, 181, 181, None), "MI210 data sheet", True),
    (r"Instinct MI100", (46.1, None, 92.3, 184.6, None), "MI100 data sheet", False),
    (r"Radeon PRO W7900.*", (61.3, None, 122.6, 122.6, None), "W7900 product page", True),
    (r"Radeon PRO W7800", (45.2, None, 90.5, 90.5, None), "W7800 product page", True),
    (r"Radeon RX 7900 XTX", (61.4, None, 122.8, 122.8, None), "RX 7900 XTX product page", True),
    (r"Radeon RX 9070 XT", (48.7, None, 195, 195, 389), "RX 9070 XT product page", True),
    (r"Intel\(R\) Data Center GPU Max 1100", (22.2, None, 355.5, 355.5, None), "Intel's specifications of the Max 1100", True),
    (r"Intel\(R\) Arc\(TM\) B580 Graphics", (13.7, None, 116.5, 116.5, None), "Intel's specifications of the B580", True),
)  # fmt: skip
_MAKER = re.compile(r"^(?:NVIDIA|AMD|Tesla)\s+", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s of a GPU in `precision` (fp32, tf32, bf16, fp16, fp8); None when it is not in the table."""
    found = _find(device_name)
    teraflops = None if found is None or precision not in _PRECISIONS else found[0][_PRECISIONS.index(precision)]
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
    for pattern, rates, document, compared in _TABLE:
        shown = ", ".join(f"{name} {rate:g}" for name, rate in zip(_PRECISIONS, rates, strict=True) if rate is not None)
        yield f"{pattern}: {shown} TFLOP/s; {_source(document, compared=compared)}"


def _find(device_name: str) -> tuple[tuple[float | None, ...], str, bool] | None:
    name = _MAKER.sub("", _MAKER.sub("", device_name.strip()))
    if "MIG" in name:
        return None
    rows = (row for row in _TABLE if re.fullmatch(row[0], name, re.IGNORECASE))
    return next(((rates, document, compared) for _, rates, document, compared in rows), None)


if __name__ == "__main__":
    named = sys.argv[1:]
    lines = [f"{name}: {peak_source(name) or 'not in the table'}" for name in named] or table()
    sys.stdout.writelines(f"{line}\n" for line in lines)
