"""`freescale doctor`: what is installed, which devices there are, and whether they compute what they should."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

from freescale.comm.transports import survey
from freescale.comm.world import can_share, try_shared_nccl
from freescale.kernels import hstu_attention
from freescale.trace import host_bound

_SMALL_RUN = ("run.steps=12", "synthetic.users=200", "synthetic.items=100", "model.dim=16")

_NO_DRIVER = re.compile(r"libcuda\.so\.1: cannot open shared object file(: No such file or directory)?")


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    found: str
    ok: bool = True


def examine(*, gpu: bool = False) -> list[Finding]:
    """Versions, devices, and a self-test of each part; with `gpu` also whether the host keeps the GPU busy."""
    packages = ("freescale", "torch", "numpy", "numba", "pyarrow", "safetensors", "triton", "tensorboard")
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    ]
    findings += [Finding(name, _version(name)) for name in packages]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            findings.append(Finding(f"gpu {index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"))
    else:
        findings.append(Finding("gpu", "none that torch can use; training runs on the CPU"))
    findings += [Finding(f"transports of {what}", without_driver_jargon(line)) for what, line in survey()]
    findings.append(Finding("virtual gpus", without_driver_jargon(can_share())))
    if torch.cuda.is_available():
        works, told = try_shared_nccl()
        findings.append(Finding("nccl between virtual gpus", told, ok=works))
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        findings.append(_check(f"attention on {device}", lambda d=device: _check_attention(d)))  # type: ignore[misc]
        findings.append(_check(f"training on {device}", lambda d=device: _check_training(d)))  # type: ignore[misc]
    if gpu:
        findings.append(_check("busy time of the gpu", check_busy_time))
    return findings


def without_driver_jargon(text: str) -> str:
    """What the linker says of a missing driver, in words, its own message kept in brackets."""
    return _NO_DRIVER.sub(r"no CUDA driver on this machine (\g<0>)", text)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (optional)"


def _check(what: str, test: Callable[[], str]) -> Finding:
    try:
        return Finding(what, test())
    except Exception as error:
        return Finding(what, f"{type(error).__name__}: {error}", ok=False)


def _check_attention(device: str) -> str:
    """Jagged attention against the plain reference, forward and backward."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 70, 70, 103])
    q, k, v = (
        torch.randn(103, 2, 8, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)
    )
    outputs = [
        hstu_attention(q, k, v, offsets, scale=0.01, backend=backend) for backend in ("auto", "reference")
    ]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    error = max(
        float((a - b).detach().abs().max()) for a, b in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]))
    )
    if error > 1e-9:
        raise ArithmeticError(f"differs from the reference by {error:.1e}")
    return f"equals the reference to {error:.0e}"


def _check_training(device: str) -> str:
    """A few steps on embedded data: the loss must fall."""
    from freescale.comm.world import Ranks
    from freescale.recipe import build_run, build_source, load_config
    from freescale.train import Progress

    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [*_SMALL_RUN, f"run.out={folder}"])
        run = build_run(config, build_source(config), ranks, Progress())
        with run.open_schedule(0) as schedule:
            losses = [run.train_step.run(ready, schedule).loss for ready in schedule]
    if not losses[-1] < losses[0]:
        raise ArithmeticError(f"the loss did not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps"


def check_busy_time() -> str:
    """What share of a step the GPU has something to run, in the default recipe, and what to do where it is small."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    from freescale.comm.world import Ranks
    from freescale.recipe import build_run, build_source, load_config
    from freescale.trace import record_into, total
    from freescale.train import AccountedStep, Progress, take_steps

    seen: list[AccountedStep] = []
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, ["run.steps=48", "run.device=cuda", f"run.out={folder}"])
        run = build_run(config, build_source(config), Ranks(rank=0, num_ranks=1, device=device), Progress())
        run.accounts.write = seen.append
        try:
            with run.open_schedule(0) as schedule:
                take_steps(run, schedule)
        finally:
            run.accounts.close()
            record_into(None)
    steps = [step for step in seen if step.ranks and not step.watched][-20:]
    if any(step.unknown for step in steps) or run.accounts.busy is None:
        problem = "" if run.accounts.busy is None else run.accounts.busy.times.problem
        raise RuntimeError(f"busy time unknown: {problem}")
    parts = total(step.ranks[0] for step in steps)
    step_ms = 1000 * parts.total / len(steps)
    told = f"{parts.share('compute'):.0%} of a step of {step_ms:.1f} ms of the default recipe"
    return f"{told}. {host_bound(parts.share('host'))}".strip()
