"""Settings of the language model: off by default, wrong ones are refused by name, the key is never shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from optimizer.agents import make_agents
from optimizer.agents.llm.settings import LlmSettings
from optimizer.config import ConfigError, RunConfig
from tests.optimizer.agents.llm_server import KEY
from tests.paths import ROOT

BASE = {"POLYMORPH_LLM_MODEL": "m-1", "POLYMORPH_LLM_API_KEY": KEY}
RUN = {"model": "demo", "traffic": {"name": "demo"}, "data_dir": "data"}


def test_no_model_no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LlmSettings.read({}) is None
    for name, value in BASE.items():
        monkeypatch.setenv(name, value)
    assert not [a for a in make_agents(0) if a.name.startswith("llm")], "a run that did not ask for them has none"
    assert [a.name for a in make_agents(0, ["cache"], {"model": "m-2"})] == ["cache", "llm-1"]


def test_a_runs_choice_stands_above_the_environment() -> None:
    found = LlmSettings.read(
        BASE | {"POLYMORPH_LLM_MAX_USD": "3", "POLYMORPH_LLM_AGENTS": "2"}, {"model": "m-2", "max_usd": 0.5}
    )
    assert found is not None and (found.model, found.max_usd, found.agents, found.key) == ("m-2", 0.5, 2, KEY)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MAX_USD", "a lot", "POLYMORPH_LLM_MAX_USD is 'a lot'"),
        ("MAX_TOKENS", "0", "at least 1"),
        ("USD_PER_M_INPUT", "-1", "at least 0"),
        ("USD_PER_M_OUTPUT", "3", "belong together"),
        ("TIMEOUT_S", "nan", "at least 1"),
        ("CONTEXT_TOKENS", "2000", "at least 16384"),
        ("ANSWER_TOKENS", "40000", "more than half"),
        ("AGENTS", "40", "at most 8"),
        ("BASE_URL", "api.example.com/v1", "is no address"),
        ("BASE_URL", "https://me:secret@example.com/v1", "Put the key into POLYMORPH_LLM_API_KEY"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlmSettings.read(BASE | {f"POLYMORPH_LLM_{name}": value})
    assert said in str(caught.value) and "secret" not in str(caught.value).replace("POLYMORPH", "")


def test_it_is_offered_on_pages_with_prices_only() -> None:
    priced = BASE | {"POLYMORPH_LLM_USD_PER_M_INPUT": "0", "POLYMORPH_LLM_USD_PER_M_OUTPUT": "0"}
    unpriced, own = LlmSettings.read(BASE), LlmSettings.read(priced)
    assert unpriced is not None and unpriced.offer is None
    assert own is not None and own.offer == {"model": "m-1", "host": "api.openai.com", "max_usd": 1.0}


def test_the_key_is_not_shown() -> None:
    found = LlmSettings.read(BASE)
    assert found is not None and KEY not in repr(found) and KEY not in str(found)


@pytest.mark.parametrize(
    "llm", [{"key": KEY}, {"api_key": KEY}, {"max_usd": -1}, {"max_usd": True}, {"max_usd": float("nan")}, {"model": 3}]
)
def test_a_run_takes_nothing_but_model_address_and_caps(llm: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="llm"):
        RunConfig(**RUN, llm=llm)  # type: ignore[arg-type]


def test_a_runs_choice_is_kept_in_its_configuration() -> None:
    config = RunConfig(**RUN, llm={"model": "m", "max_usd": 0.5})  # type: ignore[arg-type]
    assert RunConfig.from_json(config.to_json()) == config
    assert KEY not in str(config.to_json()) or os.environ.get("POLYMORPH_LLM_API_KEY") != KEY


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize(("key", "dumpable"), [(KEY, "0"), ("", "1")])
def test_a_process_that_holds_the_key_is_closed_to_others_of_its_user(key: str, dumpable: str) -> None:
    code = "import ctypes; from optimizer.agents import make_agents; make_agents(0, (), {'model': 'm'}); print(ctypes.CDLL(None).prctl(3))"
    environment = os.environ | {"POLYMORPH_LLM_API_KEY": key, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == dumpable
