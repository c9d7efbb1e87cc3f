"""`python -m optimizer.cost`: a line for each load, labelled, and errors that name the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.cost.__main__ import main

LLAMA = [
    "--model",
    "Llama-3.1-70B",
    "--weights",
    "fp8",
    "--kv",
    "fp8",
    "--tensor",
    "8",
    "--isl",
    "1024",
    "--osl",
    "512",
]


def test_it_prints_a_labelled_line_for_each_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "NVIDIA H200 SXM", *LLAMA, "--concurrency", "4,16"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert "8 x NVIDIA H200 SXM" in title and "https://" in title
    assert len(lines) == 2 and all("TTFT" in line and "TPOT" in line and line.endswith("estimated") for line in lines)


def test_hardware_without_points_is_labelled_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "AWS Trainium2", *LLAMA]) == 0
    assert "unvalidated: no published point of AWS Trainium2" in capsys.readouterr().out


def test_a_folder_is_a_model(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "NVIDIA B200", "--model", str(tiny_model), "--isl", "64", "--osl", "32"]
    assert main(arguments) == 0
    assert "extrapolated" in capsys.readouterr().out, "far smaller than any published point's model"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "Abacus", *LLAMA], "NVIDIA H200 SXM"),
        (["--device", "NVIDIA B200", *LLAMA[2:], "--model", "nothing"], "config.json"),
        (["--device", "NVIDIA H100 SXM", "--model", "DeepSeek-V3", "--isl", "9", "--osl", "9"], "more devices"),
        (["--device", "NVIDIA H100 SXM", *LLAMA, "--weights", "fp3"], "fp8"),
        (["--device", "NVIDIA H100 SXM", *LLAMA, "--concurrency", "0"], "at least 1"),
        (["--device", "NVIDIA H100 SXM", *LLAMA, "--concurrency", "many"], "many"),
    ],
)
def test_errors_name_the_mend(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err
