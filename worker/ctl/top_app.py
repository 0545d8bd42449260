"""The application of `workerctl top`: asks on a thread, draws on the loop. The only file that imports textual."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Footer, RichLog, Static

from worker.ctl import top_view
from worker.ctl.admin_client import NoSuchGang, ask
from worker.ctl.rings import Rings, read_rings
from worker.ctl.status import COLUMNS, heading, rows
from worker.ctl.tail import Tail
from worker.exit_codes import Failure
from worker.run_files import RunFiles

_STEPS = 24
_LINES = 20  # of each file, to begin with


class TopApp(App[None]):
    """Of one gang, until q; it says so when the gang ends, and looks for it again."""

    TITLE = "rankd"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "end"), ("p", "pause", "pause")]
    CSS = """
    #heading { height: auto; } #ranks { height: auto; max-height: 40%; }
    #pipeline, #memory { height: auto; border-top: solid $primary; }
    #events { height: 6; border-top: solid $primary; } #logs { height: 1fr; border-top: solid $primary; }
    """

    def __init__(self, files: RunFiles, log_folder: Path, interval: float) -> None:
        super().__init__()
        self._files = files
        self._logs = log_folder
        self._interval = interval
        self._before: dict[str, Any] | None = None
        self._tails: dict[Path, Tail] = {}
        self._paused = self._gone = False

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(id="heading", markup=False)
            yield DataTable(id="ranks", cursor_type="none")
            yield Static(id="pipeline")
            yield Static(id="memory")
            yield RichLog(id="events")
            yield RichLog(id="logs")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#ranks", DataTable).add_columns(*COLUMNS)
        for name in ("pipeline", "memory", "events", "logs"):
            self.query_one(f"#{name}").border_title = name
        self.look()
        self.set_interval(self._interval, self.look)

    def action_pause(self) -> None:
        self._paused = not self._paused

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """On a thread: a coordinator may take up to two seconds not to answer."""
        if self._paused:
            return
        rings: Rings | None = None
        try:
            answer = ask(self._files, "status")
            rings = read_rings(self._files, _STEPS)
        except (NoSuchGang, Failure, OSError) as error:
            self.call_from_thread(self._lost, str(error))
            return
        except ValueError:
            pass  # no step yet
        self.call_from_thread(self._draw, answer, rings, self._new_lines())

    def _lost(self, why: str) -> None:
        if not self.query("#events"):
            return  # it is closing
        if not self._gone:
            now = time.strftime("%H:%M:%S")
            self.query_one("#events", RichLog).write(f"{now} {why}")
            self.query_one("#heading", Static).update(f"{why}\nwhat is below was so until {now}")
        self._gone = True

    def _draw(self, answer: dict[str, Any], rings: Rings | None, lines: list[str]) -> None:
        if not self.query("#logs"):
            return  # it is closing
        self._gone = False
        width = max(20, self.size.width - 12)
        self.query_one("#heading", Static).update("\n".join(heading(answer)))
        table = self.query_one("#ranks", DataTable)
        table.clear()
        for row in rows(answer):
            table.add_row(*row)
        if rings is not None:
            self.query_one("#pipeline", Static).update(top_view.pipeline(rings, width))
        self.query_one("#memory", Static).update(top_view.memory_bars(answer["ranks"], max(10, width // 3)))
        for event in top_view.changes(self._before, answer):
            self.query_one("#events", RichLog).write(f"{time.strftime('%H:%M:%S')} {event}")
        for line in lines:
            self.query_one("#logs", RichLog).write(line)
        self._before = answer

    def _new_lines(self) -> list[str]:
        found: list[str] = []
        for path in sorted(self._logs.glob("*.log")):
            if path in self._tails:
                found += self._tails[path].more()
            else:
                self._tails[path] = Tail(path)
                found += self._tails[path].last(_LINES)
        return found[-200:]
