"""What every test may rely on: nothing looked up on a network, a run directory of its own, the trained model."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
for number in (signal.SIGHUP, signal.SIGINT):  # by nohup, or a script's &: what tests start would ignore them too
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="tests marked long too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch  # seconds, so only when asked for

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in needs_gpu]
        config.hook.pytest_deselected(items=needs_gpu)


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short, private `RANKD_RUN_DIR`: an ipc path holds only 107 bytes, which `tmp_path` can exceed."""
    folder = Path(tempfile.mkdtemp(prefix="rankd-"))
    monkeypatch.setenv("RANKD_RUN_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, which `scripts/test` fetches."""
    if not MODEL.is_dir():
        pytest.skip("the trained model is missing: run ./scripts/test, or python scripts/fetch_model.py")
    return MODEL
