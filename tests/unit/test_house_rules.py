"""The house rules find what they are for, and leave alone what only looks like it."""

from pathlib import Path

import pytest

from house_rules import breaches


def found(tmp_path: Path, line: str, name: str = "a.py") -> list[str]:
    (tmp_path / name).write_text(line + "\n")
    return breaches(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "import " + "pickle",
        "    from " + "pickle import loads",
        "weights = torch" + ".load(path)",
        "dist.all_gather" + "_object(out, this)",
        "dist.broadcast" + "_object_list([config])",
        "from a import b  # no" + "qa",
        "from a import b  # no" + "qa: F401",
        "x = f()  # ty" + "pe: ignore[no-any-return]",
        "x = f()  # ty" + "pe: ignore",
        "os.kill(pid, sig" + "nal.SIGSTOP)",
        "process.sus" + "pend()",
        'model = "' + "/home" + '/me/model"',
        'source = "https://' + 'pypi.org/simple"',
    ],
)
def test_breaches_are_found(tmp_path: Path, line: str) -> None:
    assert len(found(tmp_path, line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "# no pickle here, ever",
        "x = f()  # type: ignore[no-any-return]  # zmq types its frames as Any",
        "from a import b  # noqa: F401  re-exported",
        'path = f"{root}/work/x"',
        "ratio = lines/work/seconds",
    ],
)
def test_lookalikes_are_not(tmp_path: Path, line: str) -> None:
    assert found(tmp_path, line) == []


def test_a_long_file_is_named_with_its_length(tmp_path: Path) -> None:
    assert found(tmp_path, "x = 1\n" * 401) == ["a.py:402: a file has one subject and at most 400 lines"]


def test_prose_is_searched_for_paths_only(tmp_path: Path) -> None:
    assert found(tmp_path, "torch" + ".load(x)", "a.md") == []
    assert len(found(tmp_path, "see " + "/root" + "/notes", "a.md")) == 1
