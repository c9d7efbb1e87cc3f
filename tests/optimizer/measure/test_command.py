"""`python -m optimizer.measure`: figures of any OpenAI-compatible server, and sentences when there are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.artifacts import Artifact
from optimizer.measure.__main__ import main
from tests.optimizer.scripted import SMALL
from tests.serving import Server, free_port, serve


@pytest.fixture(scope="module")
def server(tiny_model: Path, baseline: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    options = ["--dtype", "float32", "--threads", "1", "--kv-bytes", str(8 << 20)]
    arguments = ["--model", str(tiny_model), "--name", "tiny", "--artifact", str(baseline.path), *options]
    with serve("engine.api", arguments, folder / "api.log") as running:
        yield running


@pytest.fixture
def traffic(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL.to_json()))
    return str(path)


@pytest.mark.parametrize(
    "mode",
    [[], ["--chat"], ["--rate", "50"], ["--tokenizer", "{model}"], ["--temperature", "0.7", "--top-p", "0.95"]],
    ids=str,
)
def test_it_measures_a_server(server: Server, traffic: str, tiny_model: Path, tmp_path: Path, mode: list[str]) -> None:
    out = tmp_path / "figures.json"
    more = [m.format(model=tiny_model) for m in mode]
    assert main([server.url, "--model", "tiny", "--traffic", traffic, "--requests", "6", "--out", str(out), *more]) == 0
    told = json.loads(out.read_text())
    assert (told["summary"]["requests"], told["summary"]["failed"]) == (6, 0)
    assert told["summary"]["output_tput"] > 0 and len(told["samples"]) == 6
    assert (told["summary"]["conc"] is None) == ("--rate" in mode)
    if "--tokenizer" in mode:
        wanted = SMALL.sample(6, 0, "heldout")
        assert [(s["isl"], s["osl"]) for s in told["samples"]] == [(w.isl, w.osl) for w in wanted]


def test_what_cannot_be_measured_is_one_sentence(
    server: Server, traffic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    nobody = f"http://127.0.0.1:{free_port()}"
    cases = [
        ([nobody, "--model", "tiny"], "A warm-up request failed"),
        ([server.url, "--model", "another"], "A warm-up request failed: there is no model 'another'"),
        (["no address", "--model", "tiny"], "no address"),
        ([server.url, "--model", "tiny", "--key-from", "NO_SUCH_KEY"], "NO_SUCH_KEY is empty"),
        ([server.url, "--model", "tiny", "--chat", "--tokenizer", "demo"], "A chat takes text"),
        ([server.url, "--model", "tiny", "--traffic", "nothing-like-it"], "nothing-like-it"),
    ]
    for arguments, said in cases:
        assert main(["--traffic", traffic, *arguments]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert error.startswith("polymorph: ") and said in error, error
