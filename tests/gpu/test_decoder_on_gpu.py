"""The decoder and encoded items on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.kernels import AttentionMask, SequenceLayout, softmax_attention
from freescale.kernels.attention import reference
from tests.gpu.test_on_gpu import train_on
from tests.item_files import write_made_up_texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DECODER = ("model.kind=llama", "model.dim=32", "model.heads=4", "model.kv_heads=2")
# Largest difference from the float64 reference, relative to the largest value.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "segments"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(8, 2, 64), (4, 1, 128), (6, 3, 48), (2, 1, 256)])
def test_shared_heads_equal_the_reference(heads, key_heads, width, dtype, masked) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    lengths = torch.tensor([0, 1, 17, 300, 64, 129])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    q, k, v = (
        torch.randn(total, n, width, device="cuda").to(dtype).requires_grad_()
        for n in (heads, key_heads, key_heads)
    )
    mask = None
    if masked:
        places = torch.cat([torch.arange(n) for n in lengths.tolist()])
        mask = AttentionMask(segments=places // 40, summaries=places % 40 >= 36)
    layout = SequenceLayout(offsets, device="cuda")
    ours = softmax_attention(q, k, v, offsets, scale=width**-0.5, layout=layout, mask=mask, backend="triton")
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = reference.softmax_attention(*wide, offsets, scale=width**-0.5, mask=mask)
    weight = torch.randn_like(ours)
    got = (ours, *torch.autograd.grad(ours, (q, k, v), weight))
    wanted = (truth, *torch.autograd.grad(truth, wide, weight.double()))
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()
    again = torch.autograd.grad(
        softmax_attention(q, k, v, offsets, scale=width**-0.5, layout=layout, mask=mask),
        (q, k, v),
        weight,
    )
    assert all(torch.equal(a, b) for a, b in zip(got[1:], again, strict=True))


def test_the_decoder_follows_the_curve_of_the_cpu(tmp_path: Path) -> None:
    recipe = (*DECODER, "model.dtype=float64", "run.steps=40", "run.eval_every=20")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)


def test_the_decoder_learns_nearly_as_well_in_bfloat16(tmp_path: Path) -> None:
    recipe = (*DECODER, "run.steps=150", "run.eval_every=150")
    plain = train_on("cuda", tmp_path / "a", *recipe)
    narrow = train_on("cuda", tmp_path / "b", *recipe, "model.dtype=bfloat16")
    assert np.mean(narrow["losses"][-20:]) == pytest.approx(np.mean(plain["losses"][-20:]), rel=0.03)


@pytest.mark.parametrize("add_ids", ["true", "false"])
def test_texts_are_encoded_on_the_gpu_as_on_the_cpu(tmp_path: Path, add_ids: str) -> None:
    file = write_made_up_texts(tmp_path / "texts.parquet", 150)
    recipe = (
        "items.kind=text",
        "items.dim=16",
        f"items.file={file}",
        f"items.add_ids={add_ids}",
        "items.chunk=40",
    )
    recipe += ("model.dtype=float64", "run.steps=30", "run.eval_every=15")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)
    assert [e["hr@10"] for e in gpu["evals"]] == pytest.approx([e["hr@10"] for e in cpu["evals"]])


def test_texts_and_decoder_in_bfloat16(tmp_path: Path) -> None:
    file = write_made_up_texts(tmp_path / "texts.parquet", 150)
    recipe = (
        *DECODER,
        "items.kind=text",
        "items.dim=32",
        f"items.file={file}",
        "run.steps=100",
        "run.eval_every=100",
    )
    plain = train_on("cuda", tmp_path / "a", *recipe)
    narrow = train_on("cuda", tmp_path / "b", *recipe, "model.dtype=bfloat16")
    assert np.mean(narrow["losses"][-20:]) == pytest.approx(np.mean(plain["losses"][-20:]), rel=0.03)
