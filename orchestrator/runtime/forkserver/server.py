"""The fork server's entry point: `PYTHON -u server.py --socket S --log L [--preload MODULE]`.

Owns the outermost stack frame. In the server this frame calls serve.main; in a training process serve.main has returned
what to run, all of the server's frames are gone, and the user's code runs directly on top of this one. Falling off the
end of this file is therefore the real end of an interpreter, as for a script started by hand: CPython itself handles exit
codes, exception hooks, threads, atexit and open files.
"""

import sys

_startup_modules = frozenset(sys.modules)

import importlib.util  # noqa: E402 - the modules of a bare interpreter are recorded first
import os  # noqa: E402 - as above
from typing import Any  # noqa: E402 - as above

_HERE = os.path.dirname(os.path.realpath(__file__))
_PACKAGE = "_orch_forkserver"


def _load_package() -> Any:
    """Import this folder as a package whose name no user has, and which is not on sys.path."""
    if sys.path and os.path.realpath(sys.path[0]) == _HERE:
        del sys.path[0]
    init = os.path.join(_HERE, "__init__.py")
    spec = importlib.util.spec_from_file_location(_PACKAGE, init, submodule_search_locations=[_HERE])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{_PACKAGE}.serve")


if __name__ == "__main__":
    _program = _load_package().main(_startup_modules)
    if _program is not None:
        try:
            _program.take()()
        except BaseException as _error:
            _program.failing(_error)
            raise
