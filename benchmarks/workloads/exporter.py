"""Exports every GPU of this host until it is told to stop; prints the address. What an exporter actor does, without Ray."""

from __future__ import annotations

import signal
import sys
import threading

from orchestrator.gpu.exporter import ExporterSettings, GpuExporter
from orchestrator.gpu.inventory import open_readers


def main() -> None:
    """Serve: `exporter.py RATE [UUID ...]`."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    readers = open_readers(sys.argv[2:] or None)
    with GpuExporter(readers, "bench", ExporterSettings(rate=float(sys.argv[1]))) as exporter:
        print(exporter.url, flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
