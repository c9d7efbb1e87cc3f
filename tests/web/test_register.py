"""Registering an endpoint: model, traffic of three kinds, and everything that can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections
from django.http import HttpResponse
from django.test import AsyncClient, Client

from kernels.hardware import Gpu, Hardware
from polymorph_web.accounts.models import Organisation, User
from polymorph_web.audit.models import Entry
from polymorph_web.endpoints.models import Endpoint
from tests.conftest import write_tiny_model
from tests.damage import cut_the_weights, lose_a_shard, whole_numbers
from tests.web.gateway import Gateway

As = Callable[[str], Client]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,48,10
2023-11-16 18:17:04.0319600,31,8
2023-11-16 18:17:04.0781490,110,27
2023-11-16 18:17:05.2781490,60,12
"""
MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 * n, "input_length": 100 + n, "output_length": 20, "hash_ids": [0, n]}) + "\n"
    for n in range(6)
)


@pytest.fixture
def form(people: dict[str, User], tiny_model: Path) -> dict[str, Any]:
    return {
        "name": "Support chat",
        "slug": "support-chat",
        "model_ref": str(tiny_model),
        "dtype": "float32",
        "traffic_source": "preset",
        "preset": "demo",
        "concurrency": "3",
        "slo_ttft_ms": "1500",
        "slo_tpot_ms": "",
        "objective": "output_throughput",
        "price_per_hour": "0.25",
    }


def send(as_: As, form: dict[str, Any], **changes: Any) -> HttpResponse:
    return as_("member").post("/endpoints/new/", form | changes)


def refused(response: HttpResponse, field: str, said: str) -> str:
    """The form came back with this error beside this field, and nothing was made."""
    assert response.status_code == 200
    errors = " ".join(response.context["form"].errors.get(field, []))
    assert said in errors, response.context["form"].errors
    html = response.content.decode()
    assert 'value="Support chat"' in html and 'value="0.25"' in html, "what was typed is kept"
    assert not Endpoint.objects.filter(name="Support chat").exists()
    return html


def test_a_preset(form: dict[str, Any], as_: As, gateway: Gateway, tiny_model: Path) -> None:
    response = send(as_, form)
    assert response["location"] == "/e/support-chat/"
    endpoint = Endpoint.objects.get(slug="support-chat")
    assert endpoint.organisation.slug == "acme" and endpoint.created_by.username == "member"
    assert (endpoint.traffic["name"], endpoint.traffic["concurrency"]) == ("demo", 3)
    assert endpoint.traffic["max_context"] == 512, "clipped to the model's context"
    assert endpoint.slo == {"ttft_s": 1.5} and endpoint.price_per_hour == 0.25
    assert endpoint.serving is not None and endpoint.serving.version_id == "baseline"
    (told,) = gateway.registered
    assert (told["slug"], told["model_path"], told["dtype"]) == ("support-chat", str(tiny_model), "float32")
    assert Entry.objects.get().action == "endpoint.create"
    assert as_("viewer").get(response["location"]).status_code == 200


def test_typed_figures(form: dict[str, Any], as_: As, gateway: Gateway) -> None:
    figures = {"isl_median": "64", "isl_p95": "200", "osl_median": "32", "osl_p95": "", "request_rate": "1.5"}
    assert send(as_, form, traffic_source="form", **figures).status_code == 302
    traffic = Endpoint.objects.get().traffic
    assert traffic["isl"][3] == 64 and traffic["osl"][3] == 32
    assert (traffic["request_rate"], traffic["concurrency"]) == (1.5, 3)


@pytest.mark.parametrize(
    ("typed", "kept", "shown"),
    [
        ({}, (0.2, 0.9), "Requests sample at temperature 0.2, top-p 0.9"),
        ({"temperature": "0.7", "top_p": "0.95"}, (0.7, 0.95), "Requests sample at temperature 0.7, top-p 0.95"),
        ({"temperature": "0"}, (0, 1), "Requests are greedy (temperature 0)"),
        ({"preset": "azure-conv"}, (None, 1), "The traffic does not say how its requests sample"),
    ],
)
def test_how_requests_sample_is_kept_and_shown(
    form: dict[str, Any], as_: As, gateway: Gateway, typed: dict[str, str], kept: tuple[float, float], shown: str
) -> None:
    response = send(as_, form, **typed)
    traffic = Endpoint.objects.get().traffic
    assert (traffic["temperature"], traffic["top_p"]) == kept
    assert shown in as_("viewer").get(response["location"]).content.decode()


def test_a_gpu_is_named_where_one_is_found(form: dict[str, Any], as_: As, gateway: Gateway, monkeypatch: Any) -> None:
    found = Hardware("a CPU", 16, (), 128 << 30, gpu=Gpu("NVIDIA H200", (9, 0), 141 << 30))
    monkeypatch.setattr("polymorph_web.endpoints.services.detect", lambda: found)
    assert b"NVIDIA H200 (compute capability 9.0)" in as_("member").get("/endpoints/new/").content
    page = as_("viewer").get(send(as_, form)["location"]).content
    assert Endpoint.objects.get().hardware["gpu"] == "NVIDIA H200 (compute capability 9.0)"
    assert b"NVIDIA H200" in page and b"a CPU" not in page


def test_an_endpoint_registered_before_traffic_had_a_temperature_is_greedy(endpoint: Endpoint, as_: As) -> None:
    endpoint.traffic = {k: v for k, v in endpoint.traffic.items() if k not in ("temperature", "top_p")}
    endpoint.save()
    assert "The traffic does not say how its requests sample" in as_("viewer").get("/e/chat/").content.decode()


@pytest.mark.parametrize(
    ("name", "text", "kind", "lengths"),
    [("code.csv", AZURE, "azure", {48, 31, 110, 60}), ("chat.jsonl", MOONCAKE, "mooncake", set(range(100, 106)))],
)
def test_a_trace(
    form: dict[str, Any], as_: As, gateway: Gateway, name: str, text: str, kind: str, lengths: set[int]
) -> None:
    response = send(as_, form, traffic_source="trace", trace_file=SimpleUploadedFile(name, text.encode()))
    assert response.status_code == 302
    traffic = Endpoint.objects.get().traffic
    assert traffic["source"] == kind
    assert {isl for window in traffic["rows"].values() for isl, _ in window} <= lengths


def test_a_trace_with_a_byte_order_mark_is_read(form: dict[str, Any], as_: As, gateway: Gateway) -> None:
    upload = SimpleUploadedFile("code.csv", AZURE.encode("utf-8-sig"))
    assert send(as_, form, traffic_source="trace", trace_file=upload).status_code == 302


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("code.csv", AZURE.replace("110,27", "many,27").encode(), "code.csv, line 4, column ContextTokens: 'many' is"),
        ("code.csv", AZURE.replace("110,27", "110,-27").encode(), "line 4, column GeneratedTokens: '-27' is negative"),
        ("code.csv", AZURE.replace(",27", "").encode(), "line 4, column GeneratedTokens: the row has 2 cells"),
        ("code.csv", b"a,b\n1,2\n", "this is not the header of a trace that is known"),
        ("chat.jsonl", (MOONCAKE + '{"timestamp": 1,').encode(), "chat.jsonl, line 7"),
        ("chat.jsonl", MOONCAKE.replace('"output_length": 20', '"output": 2').encode(), "line 1, column output_length"),
        ("code.csv", "\n".join(AZURE.split("\n")[:2]).encode(), "usable requests"),
        ("photo.png", b"\x89PNG\xff\xfe", "not UTF-8 text"),
        ("empty.csv", b"", "The submitted file is empty"),
        ("code.csv", AZURE.replace("110", "1" * 30).encode(), "too large"),
    ],
)
def test_a_broken_trace_names_line_and_column(
    form: dict[str, Any], as_: As, name: str, content: bytes, said: str
) -> None:
    response = send(as_, form, traffic_source="trace", trace_file=SimpleUploadedFile(name, content))
    refused(response, "trace_file", said)


def test_a_trace_has_to_be_chosen(form: dict[str, Any], as_: As) -> None:
    refused(send(as_, form, traffic_source="trace"), "trace_file", "Choose a trace file.")


@pytest.mark.parametrize(
    ("figures", "field", "said"),
    [
        ({}, "isl_median", "Give the median length in tokens."),
        ({"isl_median": "64"}, "osl_median", "Give the median length in tokens."),
        ({"isl_median": "0", "osl_median": "4"}, "isl_median", "greater than or equal to 1"),
        ({"isl_median": "64", "isl_p95": "10", "osl_median": "4"}, "isl_median", "under the median"),
        ({"isl_median": "nan", "osl_median": "4"}, "isl_median", "Enter a number."),
        ({"isl_median": "64", "osl_median": "4", "concurrency": "0"}, "concurrency", "greater than or equal to 1"),
        ({"isl_median": "64", "osl_median": "4", "request_rate": "-1"}, "request_rate", "greater than or equal to 0"),
        ({"isl_median": "64", "osl_median": "4", "temperature": "2.5"}, "temperature", "less than or equal to 2"),
        ({"isl_median": "64", "osl_median": "4", "temperature": "warm"}, "temperature", "Enter a number."),
        ({"isl_median": "64", "osl_median": "4", "temperature": "1", "top_p": "0"}, "top_p", "Top_p is 0"),
        ({"isl_median": "64", "osl_median": "4", "top_p": "0.9"}, "top_p", "does nothing at temperature 0"),
    ],
)
def test_figures_that_cannot_be(form: dict[str, Any], as_: As, figures: dict[str, str], field: str, said: str) -> None:
    refused(send(as_, form, traffic_source="form", **figures), field, said)


@pytest.mark.parametrize(
    "ref", ["no-such-model", "/no/such/folder", "~nobody-of-this-name/model", "x" * 400, "../../etc/passwd"]
)
def test_an_unknown_model(form: dict[str, Any], as_: As, ref: str) -> None:
    html = refused(send(as_, form, model_ref=ref), "model_ref", "There is no model at")
    assert ref in html


def damaged(folder: Path, how: str) -> None:
    write_tiny_model(folder, **({"architectures": ["MambaForCausalLM"]} if how == "architecture" else {}))
    config = folder / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "json":
        config.write_text(config.read_text()[:100])
    elif how == "missing shard":
        lose_a_shard(folder)
    elif how == "cut short":
        cut_the_weights(folder)
    elif how == "whole numbers":
        whole_numbers(folder)
    elif how == "dtype":
        config.write_text(config.read_text().replace("float32", "int3"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no config", "it has no config.json"),
        ("json", "cannot be read as JSON"),
        ("dtype", "torch_dtype 'int3' is not supported"),
        ("missing shard", "lacks the shard model-00002-of-00002.safetensors"),
        ("cut short", "model.safetensors cannot be read"),
        ("whole numbers", "model.norm.weight holds I8"),
        ("architecture", "architecture 'MambaForCausalLM' is not supported"),
    ],
)
def test_a_damaged_model(form: dict[str, Any], as_: As, tmp_path: Path, how: str, said: str) -> None:
    damaged(tmp_path / "model", how)
    refused(send(as_, form, model_ref=str(tmp_path / "model")), "model_ref", said)


def test_a_name_that_is_taken(form: dict[str, Any], as_: As, endpoint: Endpoint) -> None:
    refused(send(as_, form, slug="Chat"), "slug", "An endpoint answers to this name already")


def test_a_name_taken_by_another_organisation(form: dict[str, Any], as_: As, endpoint: Endpoint) -> None:
    endpoint.organisation = Organisation.objects.get(slug="other")
    endpoint.save()
    refused(send(as_, form, slug="chat"), "slug", "choose another")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slug": "not a slug"}, "slug"),
        ({"dtype": "int3"}, "dtype"),
        ({"preset": "nonsense"}, "preset"),
        ({"traffic_source": "telepathy"}, "traffic_source"),
        ({"objective": "beauty"}, "objective"),
        ({"slo_ttft_ms": "0"}, "slo_ttft_ms"),
    ],
)
def test_values_that_are_not_offered(form: dict[str, Any], as_: As, change: dict[str, str], field: str) -> None:
    refused(send(as_, form, **change), field, "")
    assert field in send(as_, form, **change).context["form"].errors


def test_without_the_gateway_the_endpoint_is_kept_and_its_problem_told(form: dict[str, Any], as_: As) -> None:
    response = send(as_, form)
    assert response.status_code == 302
    assert "The gateway has not started yet" in Endpoint.objects.get().problem
    html = as_("viewer").get(response["location"]).content.decode()
    assert "The gateway has not started yet" in html


def test_a_gateway_that_refuses_is_quoted(form: dict[str, Any], as_: As, gateway: Gateway) -> None:
    gateway.refuse = "model.safetensors is missing"
    send(as_, form)
    assert Endpoint.objects.get().problem == "The gateway refused (503): model.safetensors is missing"


# The preview


def preview(as_: As, **form: Any) -> HttpResponse:
    response = as_("member").post("/endpoints/preview/", {"concurrency": "2", **form})
    assert response.status_code == 200
    assert b"<html" not in response.content, "a partial"
    return response


def test_the_preview_draws_the_traffic_typed_so_far(people: Any, as_: As) -> None:
    for form in (
        {"traffic_source": "preset", "preset": "demo"},
        {"traffic_source": "form", "isl_median": "64", "osl_median": "32"},
        {"traffic_source": "trace", "trace_file": SimpleUploadedFile("a.csv", AZURE.encode())},
    ):
        response = preview(as_, **form)
        assert len(response.context["charts"]) > 0 and not response.context["errors"]
        assert b"application/json" in response.content
        assert b"equests" in response.content and b"sample" in response.content, "and how its requests sample"


def test_the_preview_says_what_is_missing(people: Any, as_: As) -> None:
    assert "Give the median length" in preview(as_, traffic_source="form").content.decode()
    broken = SimpleUploadedFile("a.csv", AZURE.replace("110", "x").encode())
    html = preview(as_, traffic_source="trace", trace_file=broken).content.decode()
    assert "a.csv, line 4, column ContextTokens" in html


def test_the_preview_makes_nothing(people: Any, as_: As) -> None:
    preview(as_, traffic_source="preset", preset="demo")
    assert not Endpoint.objects.exists()


# The demo endpoint, and trying one


def test_the_demo_is_one_click_and_made_once(people: Any, as_: As, demo_model: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("polymorph_web.endpoints.services.resolve_model", lambda ref, folder: demo_model)
    first, again = (as_("member").post("/endpoints/demo/")["location"] for _ in range(2))
    assert first == again == "/e/demo/"
    assert as_("stranger").post("/endpoints/demo/")["location"] == "/e/demo-other/"
    assert Endpoint.objects.count() == 2


async def test_trying_an_endpoint_streams_its_answer(
    transactional_db: None, endpoint: Endpoint, people: dict[str, User], gateway: Gateway
) -> None:
    client = AsyncClient()
    await client.aforce_login(people["viewer"])
    response = await client.post("/e/chat/try/", {"prompt": "Hello", "max_tokens": "9999"})
    assert response["x-polymorph-version"] == "v7"
    assert response["content-type"].startswith("text/plain")
    assert b"".join([piece async for piece in response.streaming_content]).decode() == "Grüße back"
    await sync_to_async(connections.close_all)()
    (asked,) = gateway.prompts
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("chat", 256, True)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"prompt": " "}, 400, "Type a prompt first."),
        ({"prompt": "Hi", "max_tokens": "many"}, 400, "max_tokens must be a whole number."),
        ({"prompt": "Hi"}, 503, "The gateway cannot be reached. Is it running?"),
    ],
)
def test_trying_says_what_is_wrong(endpoint: Endpoint, as_: As, sent: dict[str, str], status: int, said: str) -> None:
    response = as_("viewer").post("/e/chat/try/", sent)
    assert response.status_code == status
    assert said in response.json()["error"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "goodput", "slo_ttft_ms": "", "slo_tpot_ms": ""}, "give one of them"),
        ({"objective": "cost", "price_per_hour": "0"}, "need a price of the device"),
    ],
)
def test_an_objective_without_what_it_needs(form: dict[str, Any], as_: As, changes: dict[str, str], said: str) -> None:
    response = send(as_, form, **changes)
    assert said in response.context["form"].errors["objective"][0] and not Endpoint.objects.exists()
