"""The one-time link that signs a browser in to the page: what the API answers, and the port that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orchestrator.api.view import View

if TYPE_CHECKING:
    from orchestrator.api.service import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLinkView(View):
    """A link that signs in once, as the caller, within ``valid_seconds``; ``address`` is the page without it."""

    url: str
    address: str
    valid_seconds: float


class PageLinks(Protocol):
    """Makes links to the page of this daemon."""

    def link(self, caller: Caller) -> PageLinkView:
        """A new link for ``caller``. Raises RefusedError where too many are unused."""
        ...
