"""What leaves a cluster: figures, versions and ranks; no names of machines, users or folders."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

import pytest

from freescale.prove import Facts, Finding, Proof, Table
from freescale.prove.page import render
from freescale.prove.privacy import private_words, scrub
from freescale.prove.proof import Tried

WORDS = ["node-a17", "ada", "/home/ada", "/scratch/runs"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("rank 1 on node-a17 failed", "rank 1 on [private] failed"),
        ("no such file: /home/ada/runs/x.json", "no such file: [path]"),
        ("connect to 10.77.0.2:29500 failed", "connect to [address]:29500 failed"),
        ("GPU-5a0f1c2d-0000-1111-2222-333344445555 twice", "[gpu] twice"),
        ("ada may not write", "[private] may not write"),
        ("1.25 times, 4 KiB, 3/4 of 2.31.2, 50 GB/s", "1.25 times, 4 KiB, 3/4 of 2.31.2, 50 GB/s"),
        ("torch 2.11.0+cu130, driver 580.159.03", "torch 2.11.0+cu130, driver 580.159.03"),
        ("canada adapts", "canada adapts"),
        ("fe80:0:0:0:1:2:3:4 is up", "[address] is up"),
    ],
)
def test_private_words_paths_and_addresses_go(text, clean):
    assert scrub(text, WORDS) == clean


def test_it_reaches_into_whatever_json_holds():
    assert scrub({"on node-a17": ["ada", 3, {"x": "/a/b"}]}, WORDS) == {
        "on [private]": ["[private]", 3, {"x": "[path]"}]
    }


def test_a_machine_knows_its_own_names():
    words = private_words()
    assert platform.node() in words or len(platform.node()) < 3
    assert getpass.getuser() in words
    assert os.getcwd() in words


def test_neither_page_nor_json_has_any_of_it():
    said = f"rank 1 on {platform.node()}: {getpass.getuser()} may not write {Path.home()}/x/y, 10.0.0.7"
    finding = Finding(said, "not proven", said, {"x": said}, Table(("a",), [[said]]))
    proof = Proof(
        Facts("cpu", 2, 1, True),
        [Tried("one", "A claim", [finding], 1.0)],
        f"freescale prove --out {Path.home()}/p",
    )
    clean = proof.without_private(private_words())
    for text in (clean.to_json(), render(clean), "\n".join(clean.claims[0].lines())):
        for word in (f"on {platform.node()}", str(Path.home()), "10.0.0.7"):
            assert word not in text
    assert json.loads(clean.to_json())["not_proven"] == 1
