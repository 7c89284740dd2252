"""One-time link that signs a browser in to the page: its API view, and the port that makes links."""

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
        """Return a new link for ``caller``. Raises RefusedError if too many are unused."""
        ...
