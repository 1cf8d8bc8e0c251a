"""Who may send requests to the dashboard: checks the site that a browser names, and the token for orders. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

SCHEME: Final = "Bearer "
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer. They disable inline scripts and styles."""


def is_of_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of another site made a browser send this request.

    A form, or a script, of any site can make a browser post to an address that only the browser reaches. The browser
    then names the origin in one of these headers, which no page can change. Programs send neither.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    return site != "same-origin" or (origin is not None and _host_of(origin) != headers.get("host"))


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # no address, such as "http://["
        return None


def is_token(authorization: str, token: str) -> bool:
    """Whether a request's `Authorization` has the token. The time does not depend on where a wrong one of the same
    length differs.

    Browsers send this header only if a page of the same origin sets it, so no other site can make them do so.
    """
    given = authorization.removeprefix(SCHEME) if authorization.startswith(SCHEME) else ""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())
