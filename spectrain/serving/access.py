"""Who may ask: keys, hosts, origins; and what a browser may do with the answers."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response

from spectrain.serving.protocol import ApiError

OPEN_PATHS = ("/", "/health")  # and /static: without a key
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Access:
    """Who is let in. Without `key` everybody who reaches the port."""

    key: str | None = None
    hosts: tuple[str, ...] = ()  # names in the Host header, besides localhost and addresses
    origins: tuple[str, ...] = ()  # pages of other origins that may ask

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise ApiError where a request is not let in."""
        host = headers.get("host")
        # A foreign name that was pointed at this machine. Browsers always say a name, which HTTP/1.0 need not do.
        if host is not None and not self._is_own(urlsplit(f"//{host}").hostname or ""):
            raise ApiError(403, "this Host is not served; add it to allow_hosts")
        origin = headers.get("origin")
        is_foreign = origin not in (None, *self.origins) and urlsplit(origin).netloc != host
        if is_foreign and method not in ("GET", "HEAD"):
            raise ApiError(403, "pages of another origin may not ask here; add it to allow_origins")
        if self.key is None or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self.key.encode()):
            raise ApiError(401, "give the server's key as Authorization: Bearer <key>", code="invalid_api_key")

    def _is_own(self, name: str) -> bool:
        if name == "localhost" or name in self.hosts:
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class Guard:
    """Checks each request before anything else does, and says in each answer what a browser may do with it."""

    def __init__(self, app: Callable[..., Awaitable], access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_marked(message: dict) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self.access.check(scope["method"], scope["path"], Headers(scope=scope))
        except ApiError as error:
            return await refusal(error)(scope, receive, send_marked)
        except ValueError:  # of urlsplit
            return await refusal(ApiError(400, "a header cannot be read"))(scope, receive, send_marked)
        await self.app(scope, receive, send_marked)


def refusal(error: ApiError) -> Response:
    headers = {} if error.retry_s is None else {"retry-after": str(error.retry_s)}
    return JSONResponse(error.body, error.status, headers)
