"""Sign-in: exchanges a one-time link for a cookie. The cookie is signed, so that it survives a restart of the daemon.

A cookie names a user and a time; its MAC uses a key that only the daemon's owner can read. Links are kept in memory, as
digests: a used, old or earlier daemon's one is refused.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import RefusedError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable

LINK_SECONDS: Final = 600.0
COOKIE_SECONDS: Final = 12 * 3600.0
MOST_LINKS: Final = 256
"""Maximum number of unused links; each takes a few hundred bytes."""

REMEDY: Final = "`orch ui` opens the page with a new link, `orch ui --print` prints one"


class SignIn:
    """Links and cookies of one daemon. ``now`` gives Unix time."""

    def __init__(self, key: bytes, now: Callable[[], float]) -> None:
        self._key = key
        self._now = now
        self._links: dict[bytes, tuple[int, float]] = {}

    @property
    def cookie_name(self) -> str:
        """Return the cookie's name: daemons of one machine share the host name, and so a browser's cookies, and need different names."""
        return f"orch_{sha256(b'name' + self._key).hexdigest()[:8]}"

    def new_link(self, uid: int) -> str:
        """Return a secret that signs ``uid`` in once. Raises RefusedError where too many are unused."""
        now = self._now()
        self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
        if len(self._links) >= MOST_LINKS:
            raise RefusedError(f"{MOST_LINKS} links are unused", hint=f"try again in {LINK_SECONDS / 60:.0f} minutes")
        secret = secrets.token_urlsafe(32)
        self._links[_digest(secret)] = (uid, now + LINK_SECONDS)
        return secret

    def redeem(self, secret: str) -> str:
        """Return the cookie for the link with this secret. Raises UnauthenticatedError: used, too old, or not of this daemon."""
        uid, until = self._links.pop(_digest(secret), (0, 0.0))
        if until <= self._now():
            raise UnauthenticatedError("this link was used already, or is too old", hint=REMEDY)
        return self._signed(f"{uid}.{int(self._now() + COOKIE_SECONDS)}.{secrets.token_urlsafe(9)}")

    def user_of(self, cookie: str) -> int | None:
        """Return the user that a cookie names; None for one that is forged, changed or too old."""
        text, _, _ = cookie.rpartition(".")
        if not hmac.compare_digest(self._signed(text).encode(), cookie.encode("utf-8", "replace")):
            return None
        uid, until, _ = text.split(".", 2)
        return int(uid) if int(until) > self._now() else None

    def _signed(self, text: str) -> str:
        return f"{text}.{hmac.new(self._key, text.encode('utf-8', 'replace'), sha256).hexdigest()}"


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
