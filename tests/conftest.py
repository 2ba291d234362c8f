"""What every test process needs."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Several test processes share few cores: one thread each, also in the commands they start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tests fork ranks, also after they have computed themselves. On Arm, oneDNN's thread pool does not survive a fork
# (a forked rank would hang in its first float32 product), so tests do without oneDNN.
torch.backends.mkldnn.enabled = False

# Without a GPU, Triton kernels run in Triton's interpreter; it must know before they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that are given no folder leave theirs where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("runs"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True)
def no_failure_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage in which a thread failed first is what a failing process tells; tests go on in the same process."""
    monkeypatch.setattr("freescale.trace.spans._failure", None)
