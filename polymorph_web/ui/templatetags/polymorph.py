"""Template tags and filters: icons, states, figures and charts. All output is escaped or built with format_html."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django import template
from django.templatetags.static import static
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join, json_script
from django.utils.safestring import SafeString

from polymorph_web.endpoints.charts import Spark
from polymorph_web.ui import words
from polymorph_web.ui.figures import Chart

register = template.Library()

for name, function in {
    "ms": words.millis,
    "duration": words.duration,
    "times": words.times,
    "usd": words.usd,
    "percent": words.percent,
    "signed_percent": words.signed_percent,
    "measured": words.measured,
}.items():
    register.filter(name, function)


@register.filter
def figures(value: Any, digits: int = 3) -> str:
    """A plain number to `digits` significant figures."""
    found = words.number(value)
    return words.DASH if found is None else words.significant(found, int(digits))


@register.filter
def whole(value: Any) -> str:
    found = words.number(value)
    return words.DASH if found is None else f"{found:,.0f}"


@register.filter
def rest_of_100(share: Any) -> float:
    """Where a bar of `share` begins when it ends at 100."""
    return round(100 - 100 * (words.number(share) or 0.0), 1)


@register.filter
def short(value: Any, length: int = 10) -> str:
    return str(value or "")[: int(length)]


@register.filter
def item(mapping: Any, key: Any) -> Any:
    return mapping.get(key) if isinstance(mapping, Mapping) else None


NOTABLE = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "amx_tile",
    "asimd",
    "sve",
    "bf16",
)


@register.filter
def notable(features: Any) -> list[str]:
    """The CPU features that decide which kernels can run, of a long list of flags."""
    return [name for name in NOTABLE if name in (features or ())]


@register.filter
def initials(value: Any) -> str:
    letters = [
        part[0] for part in str(value or "?").replace("@", " ").replace("-", " ").replace(".", " ").split() if part
    ]
    return "".join(letters[:2]).upper()


@register.simple_tag
def post_kind(kind: Any) -> SafeString:
    """Icon + word + colour of what an agent does with a post."""
    found = words.post_word(kind)
    return format_html('<span class="state {}">{}{}</span>', found.tone, icon(found.icon), found.word)


@register.filter
def unix_time(value: Any) -> datetime | None:
    """Unix seconds, an ISO string or a datetime as an aware datetime."""
    if isinstance(value, datetime):
        return value
    seconds = words.number(value)
    if seconds is not None:
        return datetime.fromtimestamp(seconds, tz=timezone.get_current_timezone())
    return parse_datetime(value) if isinstance(value, str) else None


@register.simple_tag
def interval(low: Any, high: Any) -> str:
    return words.interval(low, high)


@register.simple_tag
def provenance(key: Any, seen: Any) -> str:
    return words.provenance(key, seen)


@register.simple_tag
def icon(name: str, extra: str = "") -> SafeString:
    """A decorative icon: the word beside it carries the meaning."""
    return format_html(
        '<svg class="icon {}" aria-hidden="true" focusable="false"><use href="{}#{}"></use></svg>',
        extra,
        static("icons.svg"),
        name,
    )


@register.simple_tag
def state(value: Any, text: str = "") -> SafeString:
    """Icon + word + colour of a state; `text` replaces the word."""
    found = words.state_word(value)
    return format_html('<span class="state {}">{}{}</span>', found.tone, icon(found.icon), text or found.word)


@register.simple_tag
def focus_tag(focus: Any) -> SafeString:
    return format_html('<span class="tag focus-tag {}">{}</span>', focus or "other", focus or "other")


@register.simple_tag
def hash_tag(value: Any, length: int = 10) -> SafeString:
    text = str(value or "")
    return format_html('<code class="hash" title="{}">{}</code>', text, text[:length])


LONG_NAME = re.compile(r"\b([0-9a-f]{8})(?:[0-9a-f]{56}|-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\b")


@register.filter
def recorded(value: Any) -> SafeString:
    """A value of the audit log for reading: hashes and run ids by their first letters, whole on hover; numbers short."""
    if isinstance(value, float):
        return format_html("{}", words.significant(value, 4))
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    parts, last = [], 0
    for found in LONG_NAME.finditer(text):
        parts += [text[last : found.start()], hash_tag(found[0], 8)]
        last = found.end()
    return format_html_join("", "{}", ((part,) for part in [*parts, text[last:]]))


@register.simple_tag
def when(value: Any) -> SafeString:
    """A time the browser turns into `3 min ago`; without scripts it reads as UTC."""
    found = unix_time(value)
    if found is None:
        return format_html("{}", words.DASH)
    return format_html('<time datetime="{}" data-relative>{}</time>', found.isoformat(), f"{found:%Y-%m-%d %H:%M} UTC")


@register.simple_tag(takes_context=True)
def query(context: Any, **changes: Any) -> str:
    """The page's query string with `changes` made; None removes a key."""
    current = {k: v for k, v in context["request"].GET.items()}
    current.update({k: v for k, v in changes.items() if v is not None})
    for key in [k for k, v in changes.items() if v is None]:
        current.pop(key, None)
    return "?" + urlencode(current)


@register.inclusion_tag("components/chart.html")
def chart(figure: Chart, live: bool = False) -> dict[str, Any]:
    """The chart with its table, CSV and PNG. `live`: drawn although empty, points will be added."""
    return {"chart": figure, "live": live, "drawn": figure.figure is not None}


@register.inclusion_tag("components/field.html")
def field(bound: Any, unit: str = "") -> dict[str, Any]:
    """A form field with label, hint and errors, tied together for screen readers."""
    if bound.errors:
        described = f"{bound.id_for_label}-errors"
        bound.field.widget.attrs.update({"aria-invalid": "true", "aria-describedby": described})
    elif bound.help_text:
        bound.field.widget.attrs.setdefault("aria-describedby", f"{bound.id_for_label}-hint")
    return {"field": bound, "unit": unit}


@register.inclusion_tag("components/verification.html")
def verification(checks: Any) -> dict[str, Any]:
    """The check x case grid; accepts Check rows as dicts."""
    return {"families": group_checks(list(checks))}


def group_checks(checks: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Families in the order met, each with its checks, a verdict and a count."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in checks:
        families.setdefault(str(row["family"]), []).append(row)
    grouped = []
    for family, rows in families.items():
        verdicts = [str(r["verdict"]) for r in rows]
        worst = next((v for v in ("fail", "inconclusive", "pass") if v in verdicts), "not_applicable")
        grouped.append(
            {"name": family, "checks": rows, "verdict": worst, "passed": verdicts.count("pass"), "total": len(rows)}
        )
    return grouped


@register.inclusion_tag("components/sparkline.html")
def sparkline(spark: Spark) -> dict[str, Any]:
    """A trend line without axes."""
    return {"spark": spark}


@register.simple_tag
def run_phases() -> tuple[tuple[str, str], ...]:
    """A run's phases in order: key and word."""
    return words.PHASES


@register.simple_tag
def state_words() -> SafeString:
    """Icons, words and tones of every state for the page's scripts, so that both sides say the same."""
    states, posts = ({k: w._asdict() for k, w in known.items()} for known in (words.STATES, words.POST_WORDS))
    return json_script({"states": states, "posts": posts, "provenances": words.PROVENANCES}, "state-words")
