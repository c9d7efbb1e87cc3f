"""What a person chooses before an optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms

from optimizer.published import Published, PublishedError, read_published

MAX_PUBLISHED_BYTES = 4 << 20
FOCI = (
    ("attention", "Attention"),
    ("projections", "Projections and fusion"),
    ("cache", "Cache layout"),
    ("scheduling", "Scheduling"),
)
TOLERANCES = (
    ("near", "Near: same precision, judged against float32"),
    ("exact", "Exact: bytes equal to the baseline's"),
    ("quantised", "Quantised: weights or cache in 8 or 4 bits too; outputs change, verification bounds by how much"),
)


class OptimiseForm(forms.Form):
    budget_minutes = forms.FloatField(
        label="Budget",
        min_value=0.5,
        max_value=24 * 60,
        initial=5,
        help_text="Minutes of this device, all phases together.",
    )
    tolerance = forms.ChoiceField(label="Tolerance", choices=TOLERANCES, initial="near", widget=forms.RadioSelect)
    foci = forms.MultipleChoiceField(
        label="Search space", choices=FOCI, initial=[f for f, _ in FOCI], widget=forms.CheckboxSelectMultiple
    )
    seed = forms.IntegerField(
        label="Seed", min_value=0, initial=0, required=False, help_text="The same seed repeats the same search."
    )
    llm = forms.BooleanField(label="Ask the language model too", required=False)
    llm_max_usd = forms.FloatField(label="It may cost", min_value=0.01, required=False)

    def __init__(self, *args: Any, offer: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`offer` is the deployment's language model (`settings.LLM_OFFER`); without one the form has no such fields."""
        super().__init__(*args, **kwargs)
        if offer is None:
            del self.fields["llm"], self.fields["llm_max_usd"]
            return
        most = offer["max_usd"]
        self.fields["llm_max_usd"] = forms.FloatField(
            label="It may cost", min_value=0.01, max_value=most, initial=most, required=False,
            help_text=f"In this run, beside the device's time; at most ${most:.2f} here. It stops when that is reached.",
        )  # fmt: skip
        self.sends = (
            f"{offer['model']} at {offer['host']} is sent sources and figures of this run, never your requests."
        )

    def clean(self) -> dict[str, Any]:
        chosen = super().clean() or {}
        if chosen.get("llm") and not chosen.get("llm_max_usd") and "llm_max_usd" not in self.errors:
            self.add_error("llm_max_usd", "Say what the language model may cost in this run.")
        return chosen


class PublishedForm(forms.Form):
    """A file of published results; cleaned to the points that it holds."""

    results = forms.FileField(
        label="Results file", help_text="InferenceX's JSON: one result, a list of them, or one a line."
    )

    def clean_results(self) -> tuple[str, list[dict[str, Any]]]:
        upload = self.cleaned_data["results"]
        if upload.size > MAX_PUBLISHED_BYTES:
            raise forms.ValidationError(
                f"The file has {upload.size >> 20} MB; at most {MAX_PUBLISHED_BYTES >> 20} are taken."
            )
        try:
            found: list[Published] = read_published(upload.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise forms.ValidationError("The file is not text: give JSON.") from error
        except PublishedError as error:
            raise forms.ValidationError(str(error)) from error
        return upload.name, [point.to_json() for point in found]
