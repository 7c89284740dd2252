"""Script of `python -m pkg`, which writes what it can observe of itself."""

import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path

from . import helper
from .helper import WHO


def main():
    queue = get_context("spawn").SimpleQueue()
    process = get_context("spawn").Process(target=helper.child, args=(queue,))
    process.start()
    report = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": [__spec__.name, __spec__.origin, __spec__.parent],
        "loader": type(__loader__).__name__,
        "path": sys.path,
        "cwd": os.getcwd(),
        "helper": [helper.__name__, WHO],
        "child": queue.get(),
        "names": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")),
    }
    process.join()
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
