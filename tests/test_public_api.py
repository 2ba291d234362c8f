"""The names others rely on, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import freescale


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_numba() -> None:
    heavy = "{'torch', 'numba', 'pyarrow', 'rich'} & set(sys.modules)"
    assert run_python(f"import freescale, sys; print({heavy} or 'none')") == "none"


@pytest.mark.parametrize("command", ["", "'train',", "'keys',"])
def test_help_starts_without_torch(command: str) -> None:
    code = f"import sys; sys.argv=['freescale',{command}'--help'];\nfrom freescale.app.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    assert run_python(code).endswith("False")


@pytest.mark.parametrize("name", [n for n in freescale.__all__ if n != "__version__"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(freescale, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        freescale.Nothing  # noqa: B018


def test_contract_functions_are_where_they_are_promised() -> None:
    from freescale.balance import partition
    from freescale.kernels import hstu_attention

    assert [len(part) for part in partition([3, 2, 1], 3)] == [1, 1, 1]
    assert callable(hstu_attention)
