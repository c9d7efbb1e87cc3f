"""HTTP to Django, websockets to Channels."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "polymorph_web.settings")

from django.core.asgi import get_asgi_application

http = get_asgi_application()  # before anything that imports models

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402
from django.urls import path  # noqa: E402

from polymorph_web.runs.consumers import RunConsumer  # noqa: E402

sockets = URLRouter([path("ws/runs/<uuid:run_id>/", RunConsumer.as_asgi())])
application = ProtocolTypeRouter({"http": http, "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(sockets))})
