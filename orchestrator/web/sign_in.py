"""Sign-in: exchanges a one-time link, or the daemon's token, for a cookie. The cookie is signed, so that it survives a restart of the daemon.

A cookie names a user and a time; its MAC uses a key that only the daemon's owner can read. Links are kept in memory, as
digests: a link that was used, has expired or is of an earlier daemon is refused.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import RefusedError, TooManyTriesError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable

LINK_SECONDS: Final = 600.0
COOKIE_SECONDS: Final = 12 * 3600.0
MOST_LINKS: Final = 256
"""Maximum number of unused links; each takes a few hundred bytes."""

TRY_SECONDS: Final = 60.0
MOST_TRIES: Final = 5
"""Most wrong tokens from one address within ``TRY_SECONDS``."""
MOST_TRIES_IN_ALL: Final = 50

REMEDY: Final = "`orch ui` opens the page with a new link, `orch ui --print` prints one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Access of browsers to the page: with ``tls``, and from other machines (``network``)."""

    tls: bool = False
    network: bool = False


class SignIn:
    """Links and cookies of a daemon. ``now`` returns Unix time. ``token`` signs ``owner_uid`` in; empty: only links."""

    def __init__(
        self, key: bytes, now: Callable[[], float], *, token: str = "", owner_uid: int = 0, reach: Reach | None = None
    ) -> None:
        self._key = key
        self._now = now
        self._token, self._owner_uid, self.reach = token, owner_uid, reach or Reach()
        self._links: dict[bytes, tuple[int, float]] = {}
        self._tries: deque[tuple[str, float]] = deque(maxlen=MOST_TRIES_IN_ALL)

    @property
    def takes_token(self) -> bool:
        """Whether a browser may sign in with the daemon's token."""
        return bool(self._token)

    @property
    def cookie_name(self) -> str:
        """Name of the cookie, unique to the daemon: daemons on one machine share the host name, and so the cookies."""
        name = f"orch_{sha256(b'name' + self._key).hexdigest()[:8]}"
        return f"__Host-{name}" if self.reach.tls else name

    def new_link(self, uid: int) -> str:
        """Return a secret that signs ``uid`` in once. Raises RefusedError if too many are unused."""
        now = self._now()
        self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
        if len(self._links) >= MOST_LINKS:
            raise RefusedError(f"{MOST_LINKS} links are unused", hint=f"try again in {LINK_SECONDS / 60:.0f} minutes")
        secret = secrets.token_urlsafe(32)
        self._links[_digest(secret)] = (uid, now + LINK_SECONDS)
        return secret

    def redeem(self, secret: str) -> str:
        """Return the cookie for the link with this secret. Raises UnauthenticatedError if used, expired or unknown."""
        uid, until = self._links.pop(_digest(secret), (0, 0.0))
        if until <= self._now():
            raise UnauthenticatedError("this link was used already, or is too old", hint=REMEDY)
        return self._cookie(uid)

    def redeem_token(self, token: str, address: str) -> str:
        """Return the cookie of the daemon's owner for its token, sent from ``address``.

        Raises UnauthenticatedError, and TooManyTriesError after several wrong tokens, even for the right one.
        """
        now = self._now()
        while self._tries and self._tries[0][1] <= now - TRY_SECONDS:
            self._tries.popleft()
        from_there = sum(one == address for one, _ in self._tries)
        if from_there >= MOST_TRIES or len(self._tries) >= MOST_TRIES_IN_ALL:
            raise TooManyTriesError(f"{from_there or len(self._tries)} wrong tokens within {TRY_SECONDS:.0f} s")
        given = token.strip().encode("utf-8", "replace")
        if not self._token or not hmac.compare_digest(given, self._token.encode()):
            self._tries.append((address, now))
            raise UnauthenticatedError("this is not the daemon's token", hint="it is in the file of `--token-file`")
        return self._cookie(self._owner_uid)

    def _cookie(self, uid: int) -> str:
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
