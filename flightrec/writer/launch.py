"""How this package starts a Python program of its own: same interpreter, same import path, one thread a library.

Owns no state.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str, *arguments: str) -> list[str]:
    """Arguments that run a module of this package."""
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Our environment with the whole import path in its order, so that the program finds the very modules we would."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in sys.path if os.path.isabs(path)]
    if root not in paths:
        paths.append(root)
    result = dict(os.environ)
    result["PYTHONPATH"] = os.pathsep.join(paths)
    result["PYTHONSAFEPATH"] = "1"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        result[name] = "1"
    return result
