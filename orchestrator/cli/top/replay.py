"""Screen of `orch replay`: that of `orch top`, with keys to play a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from orchestrator.cli.top.app import HELP, TopApp

if TYPE_CHECKING:
    from textual.binding import BindingType

    from orchestrator.cli.top.player import Player

SKIP_SECONDS = 10.0
FAR_SECONDS = 60.0

KEYS = """\
space       pause, and play; at the end, play again
+  -        faster, slower
.  ,        one sample on, one back (pauses)
right left  ten seconds on, ten seconds back; ] and [ a minute
0  $        to the beginning, to the end

"""


class ReplayApp(TopApp):
    """Screen that plays a recording."""

    TITLE = "orch replay"
    HELP_TEXT = KEYS + "\n".join(line for line in HELP.splitlines() if not line.startswith("space"))
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "play", "Play", priority=True),
        Binding("plus", "faster(1)", "Faster"),
        Binding("minus", "faster(-1)", "Slower"),
        Binding("full_stop", "step(1)", "Step"),
        Binding("comma", "step(-1)", show=False),
        Binding("right", f"skip({SKIP_SECONDS})", show=False, priority=True),
        Binding("left", f"skip({-SKIP_SECONDS})", show=False, priority=True),
        Binding("right_square_bracket", f"skip({FAR_SECONDS})", show=False),
        Binding("left_square_bracket", f"skip({-FAR_SECONDS})", show=False),
        Binding("0", "seek(0)", show=False),
        Binding("dollar_sign", "end", "End"),
    ]

    def __init__(self, player: Player) -> None:
        super().__init__(player, interval=0.2)
        self._player = player

    @property
    def late_seconds(self) -> float:
        """Always 0: a recording is never late."""
        return 0.0

    def empty_words(self, name: str) -> str:
        """Return the text for GPUs only: a recording has no jobs or processes."""
        return super().empty_words(name) if name == "gpus" else ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable space and arrows while the filter is typed."""
        del parameters
        typing = self.focused is not None and self.focused.id == "filter"
        return not (typing and action in {"play", "skip"})

    def action_play(self) -> None:
        """Pause or play."""
        self._player.toggle()
        self.follow()

    def action_faster(self, direction: int) -> None:
        """Change the speed."""
        self._player.faster(direction)
        self.follow()

    def action_step(self, direction: int) -> None:
        """Go to the next or the previous sample."""
        self._player.step(direction)
        self.follow()

    def action_skip(self, seconds: float) -> None:
        """Go forward, or back for negative ``seconds``."""
        self._player.skip(seconds)
        self.follow()

    def action_seek(self, position: float) -> None:
        """Go to a position."""
        self._player.seek(position)
        self.follow()

    def action_end(self) -> None:
        """Go to the end."""
        self._player.seek(self._player.end)
        self.follow()
