"""What `freescale doctor` says of a machine, in words."""

from __future__ import annotations

import ctypes

import pytest

from freescale.app import doctor
from freescale.app.doctor import Finding, examine, without_driver_jargon

RAW = "libcuda.so.1: cannot open shared object file: No such file or directory"


def test_a_missing_driver_is_named_and_the_raw_message_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "can_share", lambda: f"no: {RAW}")
    monkeypatch.setattr(doctor, "survey", lambda: [("ranks", f"auto: local; not copy_engine: {RAW}; not x")])
    monkeypatch.setattr(doctor, "_check", lambda what, test: Finding(what, "left out"))
    found = {finding.what: finding.found for finding in examine()}
    assert found["virtual gpus"] == f"no: no CUDA driver on this machine ({RAW})"
    assert found["transports of ranks"] == (
        f"auto: local; not copy_engine: no CUDA driver on this machine ({RAW}); not x"
    )


def test_the_message_of_this_linker_has_the_form_that_is_known() -> None:
    with pytest.raises(OSError, match="libnothere") as caught:
        ctypes.CDLL("libnothere.so.1")
    said = str(caught.value).replace("libnothere", "libcuda")
    assert without_driver_jargon(said) == f"no CUDA driver on this machine ({said})"


def test_other_findings_stay_as_they_are() -> None:
    assert without_driver_jargon("no: MPS is switched off") == "no: MPS is switched off"


def test_busy_time_is_looked_at_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_check", lambda what, test: Finding(what, "left out"))
    asked = {finding.what for finding in examine(gpu=True)} - {finding.what for finding in examine()}
    assert asked == {"busy time of the gpu"}


def test_busy_time_without_a_gpu_is_told_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    assert doctor.check_busy_time() == "there is no GPU"
