"""Registering an endpoint: model, traffic, goals and price. Errors stand beside their field; nothing typed is lost."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.core.exceptions import ValidationError

from engine.models.errors import ModelError
from engine.models.resolve import resolve_model
from optimizer.config import DTYPES
from optimizer.objectives import OBJECTIVES
from optimizer.traffic.profile import TrafficError, TrafficProfile
from optimizer.traffic.readers import TraceError, parse_trace
from optimizer.traffic.sources import presets, profile_from_form, profile_from_trace
from polymorph_web.endpoints.models import Endpoint

SOURCES = (("preset", "A preset"), ("form", "My own figures"), ("trace", "A trace file"))
SAMPLING = ("temperature", "top_p")
LENGTHS = ("isl_median", "isl_p95", "osl_median", "osl_p95")
MAX_TRACE_BYTES = 32 << 20


class EndpointForm(forms.Form):
    name = forms.CharField(label="Name", max_length=120)
    slug = forms.SlugField(label="Model name in requests", max_length=60, help_text="Clients send it as `model`.")
    model_ref = forms.CharField(
        label="Model",
        max_length=500,
        initial="demo",
        help_text="A folder in Hugging Face layout, a .gguf file, or demo.",
    )
    dtype = forms.ChoiceField(label="Precision", choices=[(d, d) for d in DTYPES], initial="bfloat16")
    traffic_source = forms.ChoiceField(label="Traffic", choices=SOURCES, initial="preset", widget=forms.RadioSelect)
    preset = forms.ChoiceField(label="Preset", required=False, initial="demo")
    trace_file = forms.FileField(
        label="Trace",
        required=False,
        help_text="Azure or BurstGPT CSV, Mooncake or Bailian JSON lines. Only lengths and times are read.",
    )
    isl_median = forms.FloatField(label="Input tokens, median", required=False, min_value=1)
    isl_p95 = forms.FloatField(label="Input tokens, p95", required=False, min_value=1)
    osl_median = forms.FloatField(label="Output tokens, median", required=False, min_value=1)
    osl_p95 = forms.FloatField(label="Output tokens, p95", required=False, min_value=1)
    concurrency = forms.IntegerField(label="Concurrency", min_value=1, max_value=256, initial=4)
    request_rate = forms.FloatField(
        label="Requests per second", required=False, min_value=0, help_text="Empty: as many as the concurrency gives."
    )
    temperature = forms.FloatField(
        label="Temperature",
        required=False,
        min_value=0,
        max_value=2,
        help_text="Of the clients' requests; 0 is greedy. Empty: the preset's or the trace's own.",
    )
    top_p = forms.FloatField(
        label="Top-p",
        required=False,
        min_value=0,
        max_value=1,
        help_text="Empty: the preset's or the trace's own; 1 is off.",
    )
    slo_ttft_ms = forms.FloatField(label="TTFT limit (ms)", required=False, min_value=1)
    slo_tpot_ms = forms.FloatField(label="TPOT limit (ms)", required=False, min_value=0.1)
    objective = forms.ChoiceField(
        label="Objective",
        choices=[(o.name, o.title[0].upper() + o.title[1:]) for o in OBJECTIVES.values()],
        initial="output_throughput",
        help_text="What a search makes better. The limits above bound which points are recommended.",
    )
    price_per_hour = forms.FloatField(label="Price of the device ($/h)", min_value=0, initial=0.10)
    probe_traffic = forms.BooleanField(
        label="Allow probe traffic",
        required=False,
        help_text="An idle endpoint may be sent requests of its own profile during a rollout.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["preset"].choices = [(name, name) for name in presets()]
        self.profile: TrafficProfile | None = None
        self.model_path = ""

    def clean_slug(self) -> str:
        slug = self.cleaned_data["slug"].lower()
        if Endpoint.objects.filter(slug=slug).exists():
            raise ValidationError("An endpoint answers to this name already; choose another.")
        return slug

    def clean_model_ref(self) -> str:
        ref = self.cleaned_data["model_ref"].strip()
        try:
            self.model_path = str(resolve_model(ref, settings.DATA_DIR))
        except ModelError as error:
            raise ValidationError(str(error)) from error
        return ref

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        self.profile = self._sampled(self._profile(data), data)
        if data.get("objective") == "goodput" and not (data.get("slo_ttft_ms") or data.get("slo_tpot_ms")):
            self.add_error("objective", "Goodput counts requests within the limits: give one of them.")
        if data.get("objective") == "cost" and not data.get("price_per_hour"):
            self.add_error("objective", "Tokens per dollar need a price of the device.")
        return data

    def traffic_only(self) -> TrafficProfile | None:
        """The profile from the traffic fields alone, other fields unchecked (the preview). Errors are in `self.errors`."""
        kept = {"traffic_source", "preset", "trace_file", *LENGTHS, "concurrency", "request_rate", *SAMPLING}
        for name in set(self.fields) - kept:
            del self.fields[name]
        self.is_valid()
        return self.profile

    def _profile(self, data: dict[str, Any]) -> TrafficProfile | None:
        """The traffic profile that the chosen source gives; what is wrong becomes an error of its field."""
        source = data.get("traffic_source")
        concurrency = data.get("concurrency") or 4
        field = {"preset": "preset", "trace": "trace_file"}.get(str(source), "isl_median")
        try:
            if source == "preset":
                chosen = presets().get(data.get("preset") or "demo")
                return (
                    None
                    if chosen is None
                    else TrafficProfile.from_json(chosen.to_json() | {"concurrency": concurrency})
                )
            if source == "trace":
                return self._from_trace(data, concurrency)
            if source == "form":
                return self._from_figures(data, concurrency)
        except (TrafficError, TraceError) as error:
            self.add_error(field, str(error))
        return None

    def _sampled(self, profile: TrafficProfile | None, data: dict[str, Any]) -> TrafficProfile | None:
        try:
            return profile and profile.sampled(data.get("temperature"), data.get("top_p"))
        except TrafficError as error:
            self.add_error("top_p", str(error))  # a temperature's bounds are the field's own
            return None

    def _from_figures(self, data: dict[str, Any], concurrency: int) -> TrafficProfile | None:
        for name in ("isl_median", "osl_median"):
            if not data.get(name) and name not in self.errors:
                self.add_error(name, "Give the median length in tokens.")
        if any(name in self.errors for name in LENGTHS):
            return None
        values = {name: data.get(name) for name in LENGTHS}
        return profile_from_form(
            values | {"name": "form", "concurrency": concurrency, "request_rate": data.get("request_rate") or 0}
        )

    def _from_trace(self, data: dict[str, Any], concurrency: int) -> TrafficProfile | None:
        upload = data.get("trace_file")
        if upload is None:
            if "trace_file" not in self.errors:
                self.add_error("trace_file", "Choose a trace file.")
            return None
        if upload.size > MAX_TRACE_BYTES:
            self.add_error(
                "trace_file", f"The file has {upload.size >> 20} MB and at most {MAX_TRACE_BYTES >> 20} MB are taken."
            )
            return None
        upload.seek(0)
        try:
            text = upload.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            self.add_error("trace_file", "The file is not UTF-8 text. Export it as CSV or JSON lines.")
            return None
        return profile_from_trace(parse_trace(text, upload.name), concurrency)
