"""What collectives put on the network is what their ``traffic`` says."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsync.collectives.partition import IndexPartition
from sparsync_lab.bench.loopback import InterfaceCount
from sparsync_lab.bench.traffic import CASES, TOLERANCE, TrafficBench, TrafficRow
from sparsync_lab.cli.app import run

SPARSYNC = [sys.executable, "-c", "from sparsync.cli import main; main()"]


@pytest.mark.slow
def test_the_interface_counts_what_traffic_says(tmp_path: Path) -> None:
    out = tmp_path / "new" / "traffic.csv"
    sizes = ["--workers", "3", "--entries", "400000", "--density", "0.01", "--exchanges", "10"]
    command = [*SPARSYNC, "bench", "traffic", *sizes, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    if rows[0]["interface"] != "own namespace":
        pytest.skip("not allowed to make a network namespace, and others use the host's loopback interface")
    recipes = [("allgather", "sign", "ef"), ("balanced", "sign", "ef")]
    assert [(row["collective"], row["values"], row["indices"]) for row in rows] == [*CASES, *recipes]
    assert [(row["recipe"], float(row["density"]), row["share"]) for row in rows[-2:]] == [
        ("default", 0.00625, ""),
        ("balanced", 0.05, "2.0"),
    ]
    for row in rows:
        # Messages of this size are heavy enough for both: with the backend's framing and without.
        assert abs(float(row["ratio"]) - 1) <= TOLERANCE, row
        assert abs(float(row["ratio_without_framing"]) - 1) <= TOLERANCE, row
        assert 0 < int(row["framing_bytes"]) < int(row["payload_bytes"]), row
        assert int(row["control_bytes"]) < 0.02 * int(row["interface_bytes"]), row
        assert row["date"], row
    # Sent from rank to rank, or passed on by 2 others, or summed: what travels follows from what was handed over.
    handed = {
        (row["collective"], row["recipe"]): int(row["handed_bytes"]) / float(row["traffic_bytes"]) for row in rows
    }
    expected = {"allgather": 1 / 2, "gtopk": 1, "balanced": 1, "shared": 3 / 4, "dense": 3 / 4}
    parts = TrafficBench("balanced", "sign", "ef", 400_000, 0.05, share=2.0)
    there, back = (parts.wire.bytes(shape) for shape in IndexPartition(parts.layout, 3, 2.0).shapes(torch.float32))
    expected = {
        **{(name, ""): share for name, share in expected.items()},
        ("allgather", "default"): 1 / 2,
        ("balanced", "balanced"): (3 * there + back) / (2 * there + 2 * back),  # a part to itself is handed over too
    }
    assert handed == pytest.approx(expected, rel=0.02)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("share", "agrees"), [(0.85, False), (0.95, True), (1.05, True), (1.15, False)])
def test_a_wrong_traffic_is_noticed(share: float, agrees: bool) -> None:
    """An interface that counts ``share`` of what ``traffic`` says, and framing, headers and barriers beside."""
    bench, header, barrier, framing = TrafficBench("allgather", exchanges=10), 52, InterfaceCount(1000, 10, 0), 5000
    counts = []
    for payload in (share * bench.traffic(8), bench.small(8).traffic(8)):
        counts.append(InterfaceCount(round(payload) + framing + 200 * header + barrier.bytes, 200 + barrier.packets, 0))
    row = TrafficRow(bench, 8, counts[0], barrier, counts[1], handed=0, header=header)
    assert row.framing == framing
    assert row.tensor_ratio == pytest.approx(share, abs=1e-6)
    assert row.ratio == pytest.approx(share + framing / bench.traffic(8), abs=1e-6)
    assert row.agrees == agrees


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "1"], "workers must be from 2 to 64, got 1"),
        (["--workers", "3", "--workers", "65"], "workers must be from 2 to 64, got 65"),
        (["--entries", "0"], "entries must be from 1 to 1,000,000,000, got 0"),
        (["--density", "0"], "density must be above 0 and at most 1, got 0"),
        (["--density", "nan"], "density must be above 0 and at most 1, got nan"),
        (["--exchanges", "0"], "exchanges must be 1 or more, got 0"),
        (["--out", f"{__file__}/traffic.csv"], "File exists"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "traffic", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparsync: ")
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
