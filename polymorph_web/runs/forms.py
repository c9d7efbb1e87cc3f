"""What a person chooses before an optimisation."""

from __future__ import annotations

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
