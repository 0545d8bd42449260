"""What a person sees of a demo while its requests run, and the table after it."""

import statistics
import subprocess
import sys
from collections.abc import Sequence

from engine_stub.engine import Completion
from engine_stub.request import Params
from engine_stub.text import TextModel, TextStream
from gang import WORKERCTL

BOLD, DIM, PLAIN = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout and sys.stdout.isatty() else ("", "", "")


def heading(title: str, below: str = "") -> None:
    print(f"\n{BOLD}{title}{PLAIN}" + (f"\n{DIM}$ {below}{PLAIN}" if below else ""), flush=True)


class Screen:
    """First `workerctl status`, asked for once every request has a token and waited for before the first one ends, so
    that it shows all of them; then the texts.

    All requests run at once, but a terminal is read from top to bottom: the first unfinished text is shown as it comes,
    and each later one catches up when its turn is there.
    """

    def __init__(self, prompts: Sequence[str], text: TextModel, params: Params, name: str) -> None:
        self._prompts = prompts
        self._params = params
        self._streams = [TextStream(text) for _ in prompts]
        self._counts = [0] * len(prompts)
        self._done = [False] * len(prompts)
        self._unseen = [""] * len(prompts)
        self._place = -1  # of the text that is being shown
        self._ask_status = [*WORKERCTL, "status", "--name", name]
        self._status: subprocess.Popen[str] | None = None

    def on_token(self, place: int, token: int) -> None:
        self._unseen[place] += self._streams[place].add(token)
        self._counts[place] += 1
        self._done[place] = token in self._params.stop_tokens or self._counts[place] == self._params.max_tokens
        if self._status is None and all(self._counts):
            self._status = subprocess.Popen(self._ask_status, stdout=subprocess.PIPE, text=True)
        if self._status and (self._done[place] or self._status.poll() is not None):
            self._show()

    def end(self) -> None:
        """Show what is left, after the last token."""
        self._done = [True] * len(self._prompts)
        self._show()

    def _show(self) -> None:
        if self._place < 0:
            self._show_status()
            self._next_text()
        while self._place < len(self._prompts):
            self._write(self._unseen[self._place])
            self._unseen[self._place] = ""
            if not self._done[self._place]:
                return
            print()
            self._next_text()

    def _show_status(self) -> None:
        shown = self._status.communicate(timeout=10)[0] if self._status else ""
        print(f"{DIM}$ workerctl {' '.join(self._ask_status[1:])}{PLAIN}")
        print("".join(f"  {line}\n" for line in shown.splitlines()), flush=True)

    def _next_text(self) -> None:
        self._place += 1
        if self._place < len(self._prompts):
            print(f"{BOLD}{self._place + 1} │{PLAIN} {DIM}", end="")
            self._write(self._prompts[self._place])
            print(PLAIN, end="")

    @staticmethod
    def _write(text: str) -> None:
        print(text.replace("\n", f"\n{BOLD}  │{PLAIN} "), end="", flush=True)


def draw_table(prompts: Sequence[str], completions: Sequence[Completion], tokens_per_second: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_footer=True, collapse_padding=True, pad_edge=False)
    table.add_column("prompt", max_width=28, no_wrap=True, footer="together")
    total = sum(len(completion.tokens) for completion in completions)
    for title, footer in (
        ("tokens", str(total)),
        ("first ms", ""),
        ("next ms", ""),
        ("worst ms", ""),
        ("tokens/s", f"{tokens_per_second:.1f}"),
    ):
        table.add_column(title, justify="right", footer=footer)
    for prompt, completion in zip(prompts, completions, strict=True):
        intervals = [1e3 * seconds for seconds in completion.intervals_s]
        table.add_row(
            prompt.replace("\n", " "),
            str(len(completion.tokens)),
            f"{1e3 * completion.first_token_s:.0f}",
            f"{statistics.median(intervals):.1f}" if intervals else "-",
            f"{max(intervals):.1f}" if intervals else "-",
            f"{len(completion.tokens) / completion.token_s[-1]:.1f}",
        )
    Console(highlight=False).print(table)
