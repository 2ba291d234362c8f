"""Cluster descriptions: presets with sources, and clear words about everything wrong in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freescale.errors import ConfigError
from freescale.sim.inputs.cluster import load_cluster, numbers, parse_cluster, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert set(cluster.sources) == set(numbers())
    assert all(len(source) > 5 for source in cluster.sources.values())


def test_a_file_may_change_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: h100\nname: ours\nnic_gb_per_s: 25\nlatency_us: {value: 1e1, source: our own test}\n"
    )
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.nic_gb_per_s, cluster.latency_us) == ("ours", 25.0, 10.0)
    assert cluster.sources["latency_us"] == "our own test"
    assert cluster.sources["nic_gb_per_s"] == "given in the cluster file"
    assert cluster.nvlink_gb_per_s == load_cluster("h100").nvlink_gb_per_s


MEASURED = {"sm_kernel_slowdown": (1.15, "measured here")}


def test_what_was_measured_takes_the_place_of_a_presets_number_and_of_no_other(tmp_path: Path) -> None:
    preset = load_cluster("h100", measured=MEASURED)
    assert (preset.sm_kernel_slowdown, preset.sources["sm_kernel_slowdown"]) == (1.15, "measured here")
    assert replace(preset, sm_kernel_slowdown=load_cluster("h100").sm_kernel_slowdown) == load_cluster("h100")
    path = tmp_path / "mine.yaml"
    path.write_text("base: h100\n")
    assert load_cluster(str(path), measured=MEASURED).sm_kernel_slowdown == 1.15
    path.write_text("base: h100\nsm_kernel_slowdown: 1.3\n")
    given = load_cluster(str(path), measured=MEASURED)
    assert (given.sm_kernel_slowdown, given.sources["sm_kernel_slowdown"]) == (
        1.3,
        "given in the cluster file",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nic_gb_per_s: 0\nbase: h100", "nic_gb_per_s: must be above 0, got 0"),
        ("base: h100\nnic_gb_s: 25", "did you mean nic_gb_per_s?"),
        ("base: h1000", "base: allowed: b200, cpu, h100, h200; got 'h1000'"),
        ("gpus_per_node: 8", "missing: peak_tflops"),
        ("base: h100\nlink_efficiency: 1.5", "link_efficiency: must be at most 1, got 1.5"),
        ("base: h100\ngpus_per_node: 7.5", "gpus_per_node: must be a whole number"),
        ("base: h100\nlatency_us: soon", "latency_us: must be a number, got 'soon'"),
        ("base: h100\nlatency_us: .nan", "latency_us: must be a finite number"),
        ("base: h100\nlatency_us: true", "latency_us: must be a finite number, got True"),
        ("base: h100\nlatency_us: {val: 3}", "latency_us: a number, or {value: ..., source: ...}"),
        ("base: h100\nlatency_us: 1\nlatency_us: 2", "given twice"),
        ("- h100", "a cluster file is a mapping"),
        ("base: [", "not valid YAML"),
        ("sm_kernel_slowdown: 0.5\nbase: h100", "sm_kernel_slowdown: must be at least 1, got 0.5"),
    ],
)
def test_bad_files_say_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, where="mine.yaml")
    assert said in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster("base: h100\nnic_gb_per_s: -1\nwidth: 3\nlatency_us: x", where="mine.yaml")
    assert "3 problems in the cluster file mine.yaml" in str(caught.value)


def test_an_unknown_cluster_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--cluster h200"):
        load_cluster("h20")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster("nowhere.yaml")
