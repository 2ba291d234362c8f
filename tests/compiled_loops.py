"""All compiled loops, loaded: numba reads them from its cache at import, half a second in every process that trains."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import freescale


def load_compiled_loops() -> None:
    """Import every file of the package that compiles with numba."""
    package = Path(freescale.__file__).parent
    for path in sorted([*package.glob("**/*loops.py"), *package.glob("**/*_kernels.py")]):
        if "from numba import" in path.read_text(encoding="utf-8"):
            import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
