"""Text in and out of token ids, by the model folder's own tokenizer. Imported only where there is one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextModel:
    """The tokenizer of a Hugging Face folder. Raises ValueError if the folder has none that can be read."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self.stop_tokens = _stop_tokens(folder)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for what was not UTF-8 where it came from."""
        if any("\ud800" <= character <= "\udfff" for character in text):  # how Python keeps bytes it cannot decode
            raise ValueError(f"the prompt {text!r} is not UTF-8")
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class TextStream:
    """Text of a growing list of tokens, piece by piece, each ending at a whole character.

    A token's text depends on those before it, and one character may take several tokens. So what is new is the
    difference between the text of a short window with and without the tokens that came last, held back while it ends in
    the middle of a character.
    """

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._window: list[int] = []
        self._printed = 0  # tokens of the window whose text is out

    def add(self, token: int) -> str:
        """What this token makes readable; may be empty."""
        self._window.append(token)
        before = self._model.decode(self._window[: self._printed])
        text = self._model.decode(self._window)
        if text.endswith(_BROKEN) or len(text) <= len(before):
            return ""
        self._window, self._printed = self._window[self._printed :], len(self._window) - self._printed
        return text[len(before) :]


def _stop_tokens(folder: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, else of config.json; it may be one or a list."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON object: {error}") from None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(type(token) is not int for token in ids):
                raise ValueError(f"{path}: eos_token_id is {value!r}, it must be a token id or a list of them")
            return frozenset(ids)
    return frozenset()
