"""What a person chooses before an optimisation."""

from __future__ import annotations

from django import forms

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
