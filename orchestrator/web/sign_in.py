"""Sign-in: exchanges a one-time link, or the daemon's token, for a cookie. The cookie is signed, so that it survives a restart of the daemon.

A cookie names a user, a time and how often that user had signed out; itsdangerous signs it with a key that only the daemon's owner can
read. A user who signs out ends all of his sessions, in every browser. Links are kept in memory, as digests: a link that was
used, has expired or is of an earlier daemon is refused.

No user can keep another from signing in: each has some unused links, the oldest of which give way, and the right token
is accepted whatever was tried before it. The limit of wrong ones only bounds what they cost; a token has at least
``spec.token_file.SHORTEST`` characters, so that guessing is hopeless at any rate.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import structlog
from itsdangerous import BadData, URLSafeSerializer

from orchestrator.api.errors import TooManyTriesError, UnauthenticatedError
from orchestrator.durable_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger("orch.web")

LINK_SECONDS: Final = 600.0
COOKIE_SECONDS: Final = 12 * 3600.0
MAX_LINKS: Final = 16
"""Most unused links of one user."""

TRY_SECONDS: Final = 60.0
MAX_TRIES: Final = 5
"""Most wrong tokens from one address within ``TRY_SECONDS``."""
MAX_ADDRESSES: Final = 1000
"""Wrong tokens that are remembered, of all addresses."""

REMEDY: Final = "`orch ui` opens the page with a new link, `orch ui --print` prints one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Access of browsers to the page: with ``tls``, and from other machines (``network``)."""

    tls: bool = False
    network: bool = False


class SignOuts:
    """How often each user has signed out, in a file; without one, in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._counts: dict[int, int] = {}
        try:
            known = {} if path is None else json.loads(path.read_bytes())
            self._counts = {int(uid): int(count) for uid, count in known.items()}
        except FileNotFoundError:
            pass

    def of(self, uid: int) -> int:
        """Return how often the user has signed out."""
        return self._counts.get(uid, 0)

    async def add(self, uid: int) -> None:
        """Count one more; durable once this returns. On a full disk it counts until the daemon ends."""
        self._counts[uid] = self.of(uid) + 1
        if self._path is None:
            return
        try:
            await asyncio.to_thread(write_whole, self._path, json.dumps(self._counts).encode())
        except OSError as error:
            log.warning("web.sign_out_not_kept", error=str(error))


class SignIn:
    """Links and cookies of a daemon. ``now`` returns Unix time. ``token`` signs ``owner_uid`` in; empty: only links."""

    def __init__(
        self,
        key: bytes,
        now: Callable[[], float],
        *,
        token: str = "",
        owner_uid: int = 0,
        reach: Reach | None = None,
        sign_outs: SignOuts | None = None,
    ) -> None:
        self._key = key
        self._signer = URLSafeSerializer(key, salt="orch page", signer_kwargs={"digest_method": sha256})
        self._now = now
        self._token, self._owner_uid, self.reach = token, owner_uid, reach or Reach()
        self._links: dict[bytes, tuple[int, float]] = {}
        self._tries: deque[tuple[str, float]] = deque(maxlen=MAX_ADDRESSES)
        self._sign_outs = sign_outs or SignOuts()

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
        """Return a secret that signs ``uid`` in once; of too many unused ones of this user the oldest is forgotten."""
        now = self._now()
        self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
        own = [digest for digest, (user, _) in self._links.items() if user == uid]
        for digest in own[: max(0, len(own) + 1 - MAX_LINKS)]:
            del self._links[digest]
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

        Raises UnauthenticatedError, and TooManyTriesError after several wrong tokens from this address.
        """
        given = token.strip().encode("utf-8", "replace")
        if self._token and hmac.compare_digest(given, self._token.encode()):
            return self._cookie(self._owner_uid)
        now = self._now()
        while self._tries and self._tries[0][1] <= now - TRY_SECONDS:
            self._tries.popleft()
        if sum(one == address for one, _ in self._tries) >= MAX_TRIES:
            raise TooManyTriesError(f"{MAX_TRIES} wrong tokens within {TRY_SECONDS:.0f} s")
        self._tries.append((address, now))
        raise UnauthenticatedError("this is not the daemon's token", hint="it is in the file of `--token-file`")

    async def sign_out(self, uid: int) -> None:
        """End every session of a user."""
        await self._sign_outs.add(uid)

    def _cookie(self, uid: int) -> str:
        until, count = int(self._now() + COOKIE_SECONDS), self._sign_outs.of(uid)
        return str(self._signer.dumps([uid, until, count, secrets.token_urlsafe(9)]))

    def user_of(self, cookie: str) -> int | None:
        """Return the user that a cookie names; None for one that is forged, changed, too old, or of a user who signed out."""
        try:
            uid, until, count, _ = self._signer.loads(cookie)
        except BadData:
            return None
        return int(uid) if until > self._now() and count == self._sign_outs.of(uid) else None


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
