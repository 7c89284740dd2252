"""The recorder that people write: read each GPU, write a row, sleep. `pynvml_loop.py FILE SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pynvml


def main() -> None:
    """Record power and temperature at a nominal 100 Hz."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    end = time.time() + float(sys.argv[2])
    start = time.time()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        file.write("timestamp,elapsed_sec,...\n")
        while time.time() < end:
            now = time.time()
            row = [f"{now:.3f}", f"{now - start:.3f}"]
            for handle in handles:
                row.append(f"{pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.2f}")
                row.append(str(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)))
            file.write(",".join(row) + "\n")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
