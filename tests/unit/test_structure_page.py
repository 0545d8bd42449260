"""docs/structure.md names what is there: each room a folder, each file in it once."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOM = re.compile(r"^\| (?P<rooms>`[^|]*) \| (?P<files>[^|]*) \| [^|]* \|$", re.MULTILINE)


def test_every_file_that_a_room_has_is_named_once() -> None:
    rooms = list(ROOM.finditer((ROOT / "docs/structure.md").read_text()))
    assert len(rooms) > 5
    for room in rooms:
        folders = [ROOT / folder for folder in re.findall(r"`([\w/]+)`", room["rooms"])]
        there = {path.stem for folder in folders for path in folder.rglob("*")} | {"workerctl"}
        named = re.findall(r"`(\w+)`", room["files"])
        assert set(named) <= there
        assert len(named) == len(set(named)), room["rooms"]
