"""`workerctl timeline`: the pipeline of the last steps as one HTML page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang
from worker.ctl.trace import add_ring_options, rings_for
from worker.options import Parser


def timeline(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is no such gang. Raises ValueError: no steps yet, or a number of steps that is not kept."""
    parser = Parser(
        "workerctl timeline", "Draw what every rank did in the last steps as an HTML page, bubbles summed. "
    )
    add_ring_options(parser)
    parser.add_argument("--output", metavar="FILE", default="timeline.html", help="(%(default)s)")
    options = parser.parse_args(arguments)
    try:
        rings = rings_for(options, environment)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    from worker.ctl.timeline_page import page, rows_of

    with open(options.output, "w", encoding="utf-8") as file:
        file.write(page(options.name, rings))
    for row in rows_of(rings):
        print(row.said)
    print(f"drawn in {options.output}: open it in a browser")
    return 0
