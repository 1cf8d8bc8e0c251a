"""Who may send orders to the dashboard: checks their token. Pure."""

from __future__ import annotations

import hmac
from typing import Final

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


def is_token(authorization: str, token: str) -> bool:
    """Whether a request's `Authorization` has the token. The time does not depend on where a wrong one of the same
    length differs.

    Browsers send this header only if a page of the same origin sets it, so no other site can make them do so.
    """
    given = authorization.removeprefix(SCHEME) if authorization.startswith(SCHEME) else ""
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())
