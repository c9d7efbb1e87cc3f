"""Reasons are asked for whenever what customers are served may change."""

from __future__ import annotations

from typing import Any

from django import forms

from polymorph_web.endpoints.models import Endpoint, Version


class DecisionForm(forms.Form):
    reason = forms.CharField(
        label="Reason", min_length=3, max_length=2000, widget=forms.Textarea(attrs={"rows": 3}), strip=True
    )
    artifact_hash = forms.CharField(widget=forms.HiddenInput)
    action = forms.ChoiceField(
        choices=[("approve", "Approve"), ("decline", "Decline")], widget=forms.HiddenInput, required=True
    )


class RollbackForm(forms.Form):
    version = forms.ModelChoiceField(
        label="Version", queryset=Version.objects.none(), to_field_name="number", empty_label=None
    )
    reason = forms.CharField(
        label="Reason", min_length=3, max_length=2000, widget=forms.Textarea(attrs={"rows": 2}), strip=True
    )

    def __init__(self, endpoint: Endpoint, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["version"].queryset = endpoint.versions.exclude(pk=endpoint.serving_id)
