"""Which of NCCL's ways without SMs the versions have, by a table."""

from __future__ import annotations

import pytest

from freescale.comm.transports.nccl_routes import NcclFacts, choose_route, parse_version

# What a wheel of torch brings: its version and NCCL's.
WHEELS = {
    "2.11": ((2, 11), (2, 28, 9)),
    "2.12": ((2, 12), (2, 29, 7)),
    "2.13": ((2, 13), (2, 29, 7)),
    "2.14": ((2, 14), (2, 30, 7)),
    "2.15": ((2, 15), (2, 30, 7)),
}


@pytest.mark.parametrize(
    ("wheel", "nodes", "ranks", "nccl2", "zero_cta", "uneven", "route"),
    [
        ("2.11", 1, 8, False, True, 1.0, "padded"),
        ("2.11", 1, 8, False, True, 1.3, "collective"),
        ("2.11", 1, 8, False, False, 1.0, "collective"),
        ("2.11", 1, 2, False, True, 1.0, "collective"),
        ("2.11", 2, 16, False, True, 1.0, "collective"),
        ("2.12", 1, 8, False, True, 1.0, "put_signal"),
        ("2.12", 2, 16, False, True, 9.0, "put_signal"),
        ("2.13", 4, 32, True, True, 1.0, "put_signal"),
        ("2.13", 32, 256, False, True, 1.0, "collective"),
        ("2.14", 1, 8, True, True, 9.0, "window"),
        ("2.14", 4, 32, True, False, 9.0, "window"),
        ("2.14", 4, 32, False, True, 9.0, "put_signal"),
        ("2.15", 12, 100, True, True, 9.0, "window"),
        ("2.15", 13, 101, True, True, 1.1, "padded"),
        ("2.15", 13, 101, True, True, 1.21, "collective"),
        ("2.15", 1, 2, True, True, 1.0, "window"),
    ],
)
def test_the_route_of_every_version(wheel, nodes, ranks, nccl2, zero_cta, uneven, route):
    torch_version, nccl = WHEELS[wheel]
    facts = NcclFacts(torch_version, nccl, num_nodes=nodes, num_ranks=ranks, nccl2=nccl2, zero_cta=zero_cta)
    chosen = choose_route(facts, uneven=uneven)
    assert chosen.name == route
    assert chosen.sm_free == (route != "collective")
    before = ["window", "put_signal", "library", "padded"]
    refused = before if route == "collective" else before[: before.index(route)]
    assert [name for name in before if f"no {name}: " in chosen.reason] == refused


@pytest.mark.parametrize(
    ("nccl", "ranks", "route"),
    [
        ((2, 27, 7), 8, "collective"),
        ((2, 28, 0), 8, "padded"),
        ((2, 30, 6), 2, "collective"),
        ((2, 30, 7), 2, "library"),
        ((2, 31, 2), 8, "library"),
        ((2, 31, 2), 102, "padded"),
    ],
)
def test_a_newer_library_beside_an_older_torch(nccl, ranks, route):
    assert choose_route(NcclFacts((2, 11), nccl, num_nodes=1, num_ranks=ranks)).name == route


@pytest.mark.parametrize(("nccl", "route"), [((2, 31, 1), "collective"), ((2, 31, 2), "padded")])
def test_a_library_without_puts(nccl, route):
    facts = NcclFacts((2, 11), nccl, num_nodes=1, num_ranks=2, missing="ncclPutSignal")
    chosen = choose_route(facts)
    assert chosen.name == route
    assert "the loaded NCCL has no ncclPutSignal" in chosen.reason


@pytest.mark.parametrize(
    ("nccl", "route"), [((2, 28, 9), "collective"), ((2, 30, 6), "collective"), ((2, 30, 7), "padded")]
)
def test_across_machines_padding_needs_more(nccl, route):
    facts = NcclFacts((2, 11), nccl, num_nodes=2, num_ranks=16, missing="ncclPutSignal")
    assert choose_route(facts).name == route


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("2.15.0a0+git1", (2, 15, 0)),
        ("2.13.0rc1", (2, 13, 0)),
        ("2.14", (2, 14)),
    ],
)
def test_versions_are_read(text, numbers):
    assert parse_version(text) == numbers
