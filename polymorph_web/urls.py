"""Every address of the product."""

from __future__ import annotations

from django.urls import path

from polymorph_web.accounts import views as accounts
from polymorph_web.audit import views as audit
from polymorph_web.endpoints import views as endpoints
from polymorph_web.rollouts import views as rollouts
from polymorph_web.runs import views as runs
from polymorph_web.support import views as support

urlpatterns = [
    path("", endpoints.fleet, name="fleet"),
    path("health/", accounts.health, name="health"),
    path("sign-in/", accounts.sign_in, name="sign_in"),
    path("sign-in/link/<str:token>/", accounts.sign_in_link, name="sign_in_link"),
    path("sign-out/", accounts.sign_out, name="sign_out"),
    path("organisations/switch/", accounts.switch_organisation, name="switch_organisation"),
    path("endpoints/new/", endpoints.new, name="endpoint_new"),
    path("endpoints/preview/", endpoints.preview, name="endpoint_preview"),
    path("endpoints/demo/", endpoints.demo, name="endpoint_demo"),
    path("e/<slug:slug>/", endpoints.detail, name="endpoint"),
    path("e/<slug:slug>/try/", endpoints.try_it, name="endpoint_try"),
    path("e/<slug:slug>/rollback/", rollouts.rollback, name="rollback"),
    path("e/<slug:slug>/optimise/", runs.optimise, name="optimise"),
    path("runs/<uuid:run_id>/", runs.live, name="run"),
    path("runs/<uuid:run_id>/cancel/", runs.cancel, name="run_cancel"),
    path("runs/<uuid:run_id>/retry/", runs.retry, name="run_retry"),
    path("runs/<uuid:run_id>/events/", runs.events, name="run_events"),
    path("runs/<uuid:run_id>/board/", runs.board, name="run_board"),
    path("runs/<uuid:run_id>/candidates/<str:artifact_hash>/", runs.candidate, name="candidate"),
    path("runs/<uuid:run_id>/report/", runs.report, name="run_report"),
    path("runs/<uuid:run_id>/report.json", runs.report_json, name="run_report_json"),
    path("runs/<uuid:run_id>/report.csv", runs.report_csv, name="run_report_csv"),
    path("runs/<uuid:run_id>/winner.zip", runs.export_zip, name="run_export"),
    path("runs/<uuid:run_id>/published/", runs.add_published, name="run_publish"),
    path("runs/<uuid:run_id>/published/<int:results_id>/remove/", runs.remove_published, name="run_unpublish"),
    path("runs/<uuid:run_id>/approve/", rollouts.approve, name="approve"),
    path("rollouts/<int:rollout_id>/", rollouts.detail, name="rollout"),
    path("rollouts/<int:rollout_id>/panel/", rollouts.panel, name="rollout_panel"),
    path("rollouts/<int:rollout_id>/<str:action>/", rollouts.act, name="rollout_action"),
    path("audit/", audit.entries, name="audit"),
    path("audit/export.<str:form>", audit.export, name="audit_export"),
    path("support/", support.runs, name="support"),
]
