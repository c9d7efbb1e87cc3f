"""`python -m optimizer`: what cannot be done is one clear sentence on standard error and exit status 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer.__main__ import main
from optimizer.config import RunConfig
from optimizer.file_store import FileStore, worker_name
from tests.conftest import write_tiny_model
from tests.optimizer.scripted import SMALL, data_folder
from tests.paths import ROOT

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL.to_json()))
    return path


class Cli:
    """Runs the command in this process and takes down what it said."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd

    def refused(self, *arguments: str) -> str:
        """The sentence on standard error of a command that ends with status 1."""
        defaults = [
            "--data",
            str(self.folder / "data"),
            "--out",
            str(self.folder / "report.json"),
            "--dtype",
            "float32",
        ]
        self.capfd.readouterr()
        status = main([*defaults, "--threads", "1", *arguments])
        said = self.capfd.readouterr().err
        assert status == 1, said
        assert "Traceback" not in said
        assert said.startswith("polymorph: ") and said.rstrip().endswith((".", "!")), said
        return " ".join(said.split())


@pytest.fixture
def cli(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    data_folder(tmp_path / "data")
    return Cli(tmp_path, capfd)


def test_an_unknown_model_folder(cli: Cli, traffic: Path, tmp_path: Path) -> None:
    said = cli.refused("--model", str(tmp_path / "nowhere"), "--traffic", str(traffic))
    assert "nowhere" in said


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_that_lacks_a_file(cli: Cli, traffic: Path, tmp_path: Path, file: str) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    assert file.split(".")[-1] in cli.refused("--model", str(tmp_path / "model"), "--traffic", str(traffic))


def test_a_damaged_shard(cli: Cli, traffic: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    shard = tmp_path / "model" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "model.safetensors" in cli.refused("--model", str(tmp_path / "model"), "--traffic", str(traffic))


def test_an_architecture_that_is_not_served(cli: Cli, traffic: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", architectures=["MambaForCausalLM"], model_type="mamba")
    assert "mamba" in cli.refused("--model", str(tmp_path / "model"), "--traffic", str(traffic)).lower()


def test_a_failed_run_is_ended_with_its_reason(cli: Cli, traffic: Path, tmp_path: Path) -> None:
    said = cli.refused("--model", str(tmp_path / "nowhere"), "--traffic", str(traffic))
    store = FileStore(tmp_path / "data")
    (folder,) = (tmp_path / "data" / "runs").iterdir()
    last = store.events(folder.name)[-1]
    assert last["kind"] == "finished" and last["payload"]["outcome"] == "failed"
    assert last["payload"]["reason"].split()[-1] in said
    assert store.claim(folder.name, worker_name(), 10) is None


def test_an_unknown_traffic_names_the_presets(cli: Cli, tiny_model: Path) -> None:
    said = cli.refused("--model", str(tiny_model), "--traffic", "no-such-trace.csv")
    assert "no-such-trace.csv" in said and "demo" in said and "azure-code" in said


@pytest.mark.parametrize(
    ("name", "text", "line", "column"),
    [
        ("trace.csv", AZURE + "2023-11-16 18:17:04.0,many,10\n", "line 3", "ContextTokens"),
        ("trace.csv", AZURE + "soon,5,10\n", "line 3", "TIMESTAMP"),
        ("trace.jsonl", '{"timestamp": 0, "input_length": 5}\n', "line 1", "output_length"),
    ],
)
def test_a_broken_row_of_a_trace_is_named_by_line_and_column(
    cli: Cli, tiny_model: Path, tmp_path: Path, name: str, text: str, line: str, column: str
) -> None:
    (tmp_path / name).write_text(text)
    said = cli.refused("--model", str(tiny_model), "--traffic", str(tmp_path / name))
    assert name in said and line in said and f"column {column}" in said


def test_a_damaged_profile_is_named(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"name": "x",')
    assert "profile.json" in cli.refused("--model", str(tiny_model), "--traffic", str(tmp_path / "profile.json"))


@pytest.mark.parametrize(("budget", "says"), [("soon", "write 90s, 5m or 1.5h"), ("1s", "5m is a good start")])
def test_a_bad_budget(cli: Cli, tiny_model: Path, traffic: Path, budget: str, says: str) -> None:
    assert says in cli.refused("--model", str(tiny_model), "--traffic", str(traffic), "--budget", budget)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--temperature", "3", "give 0 (greedy) to 2"), ("--top-p", "0.9", "does nothing at temperature 0"),
     ("--dtype", "int3", "bfloat16"), ("--tolerance", "loose", "near"), ("--threads", "-1", "0 for all cores")],
)  # fmt: skip
def test_a_bad_option(cli: Cli, tiny_model: Path, traffic: Path, option: str, value: str, says: str) -> None:
    assert says in cli.refused("--model", str(tiny_model), "--traffic", str(traffic), f"{option}={value}")


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        (["--llm-max-usd", "2", "--llm-model", "m"], {}, "needs prices: set POLYMORPH_LLM_USD_PER_M_INPUT"),
        (["--llm-base-url", "http://127.0.0.1:9/v1"], {}, "add --llm-model, or set POLYMORPH_LLM_MODEL"),
        (["--llm-model", "m", "--llm-base-url", "nowhere"], {}, "POLYMORPH_LLM_BASE_URL 'nowhere' is no address"),
        (["--llm-model", "m"], {"TIMEOUT_S": "soon"}, "POLYMORPH_LLM_TIMEOUT_S is 'soon'"),
    ],
)
def test_a_language_model_that_cannot_be_asked(
    cli: Cli,
    tiny_model: Path,
    traffic: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    says: str,
) -> None:
    for name in [n for n in os.environ if n.startswith("POLYMORPH_LLM_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(f"POLYMORPH_LLM_{name}", value)
    assert says in cli.refused("--model", str(tiny_model), "--traffic", str(traffic), *options)
    assert not (cli.folder / "data" / "runs").is_dir() or not list((cli.folder / "data" / "runs").iterdir())


def test_a_focus_that_no_agent_has(cli: Cli, tiny_model: Path, traffic: Path) -> None:
    said = cli.refused("--model", str(tiny_model), "--traffic", str(traffic), "--foci", "beauty")
    assert "beauty" in said and "attention" in said


def test_an_out_that_cannot_be_written_is_refused_before_the_work(cli: Cli, tiny_model: Path, traffic: Path) -> None:
    out = str(cli.folder / "missing" / "report.json")
    assert out in cli.refused("--model", str(tiny_model), "--traffic", str(traffic), "--out", out)
    assert not (cli.folder / "data" / "runs").exists()


def test_an_out_that_is_a_folder_is_refused_before_the_work(cli: Cli, tiny_model: Path, traffic: Path) -> None:
    out = cli.folder / "reports"
    out.mkdir()
    assert "it is a folder" in cli.refused("--model", str(tiny_model), "--traffic", str(traffic), "--out", str(out))
    assert not (cli.folder / "data" / "runs").exists()


def test_a_data_folder_that_cannot_be(cli: Cli, tiny_model: Path, traffic: Path) -> None:
    in_the_way = cli.folder / "file"
    in_the_way.write_text("")
    said = cli.refused("--model", str(tiny_model), "--traffic", str(traffic), "--data", str(in_the_way / "data"))
    assert "--data" in said


def test_a_run_that_is_not_there(cli: Cli) -> None:
    assert "There is no run" in cli.refused("--resume", "0123456789abcdef")


@pytest.fixture
def queued(cli: Cli, tiny_model: Path) -> RunConfig:
    config = RunConfig(str(tiny_model), SMALL.to_json(), str(cli.folder / "data"), dtype="float32", threads=1)
    FileStore(cli.folder / "data").create(config.run_id, config.to_json())
    return config


def test_a_run_that_another_worker_holds(cli: Cli, queued: RunConfig) -> None:
    assert FileStore(cli.folder / "data").claim(queued.run_id, worker_name(), 60)
    assert "another worker holds it" in cli.refused("--resume", queued.run_id)


def test_a_run_that_has_ended(cli: Cli, queued: RunConfig) -> None:
    store = FileStore(cli.folder / "data")
    lease = store.claim(queued.run_id, worker_name(), 60)
    assert lease
    store.finish(lease, "no_gain", "Nothing was better.")
    assert "has ended" in cli.refused("--resume", queued.run_id)


def test_in_a_process_of_its_own_it_ends_with_status_1_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optimizer", "--model", str(tmp_path / "nowhere"), "--budget", "soon"]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "report.json")],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "'soon' is not a duration" in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
    assert not (tmp_path / "report.json").exists()
