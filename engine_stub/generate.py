"""`generate`: complete prompts on a running gang, and print the text as it comes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_stub.engine import Completion, Engine
from engine_stub.request import Params
from engine_stub.text import TextModel, TextStream
from workerproto.client import Client
from workerproto.messages import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt-ids", action="append", default=[], metavar="IDS", help="a prompt as token ids, e.g. 1,2,3"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="model folder (default: the gang's)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: 64)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever comes")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default: 1)")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 is off (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--logprobs", type=int, default=-1, metavar="N", help="with --json: those of the N likeliest")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt instead of text")


def run(args: argparse.Namespace, client: Client) -> None:
    """Raises ValueError for arguments that do not go together or that the gang does not take."""
    engine = Engine(client)
    text = _text_model(args, engine.facts.model)
    if args.prompt and text is None:
        raise ValueError(f"no tokenizer in {args.tokenizer or engine.facts.model!r}: give --tokenizer or --prompt-ids")
    prompts = [text.encode(prompt) for prompt in args.prompt if text] + [_parse_ids(ids) for ids in args.prompt_ids]
    if not prompts:
        raise ValueError("no prompt: give --prompt or --prompt-ids")
    params = _params(args, text)
    on_token = _printer("".join(args.prompt), text) if len(prompts) == 1 and not args.json else None
    completions = engine.generate(prompts, params, on_token)
    if on_token:
        print()
        return
    for place, completion in enumerate(completions):
        if args.json:
            print(json.dumps(_as_json(completion, text)))
        else:
            start = args.prompt[place] if place < len(args.prompt) else ""
            print(start + _plain(completion.tokens, text))


def _text_model(args: argparse.Namespace, model: str) -> TextModel | None:
    if args.tokenizer:
        return TextModel(args.tokenizer)
    folder = Path(model)
    return TextModel(folder) if (folder / "tokenizer.json").is_file() else None


def _params(args: argparse.Namespace, text: TextModel | None) -> Params:
    for name, least, most in (
        ("temperature", 0, 100), ("top_k", 0, 2**31 - 1), ("top_p", 0, 1), ("min_p", 0, 1), ("seed", 0, 2**53 - 1),
        ("logprobs", -1, 2**31 - 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, it must lie in {least} … {most}")
    if not args.top_p:
        raise ValueError("--top-p is 0, it must be above that: no token would be left")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.logprobs)
    stop = frozenset[int]() if args.ignore_eos or text is None else text.stop_tokens
    return Params(args.max_tokens, sampling, stop)


def _parse_ids(ids: str) -> list[int]:
    try:
        return [int(token) for token in ids.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt-ids {ids!r} are not integers") from None


def _printer(prompt: str, model: TextModel | None) -> Callable[[int, int], None]:
    stream = TextStream(model) if model else None
    start = [prompt]  # shown with the first token: by then nothing is wrong with it

    def on_token(_: int, token: int) -> None:
        text = stream.add(token) if stream else f"{token} "
        print(start.pop() if start else "", text, sep="", end="", flush=True)

    return on_token


def _plain(tokens: list[int], text: TextModel | None) -> str:
    return text.decode(tokens) if text else " ".join(map(str, tokens))


def _as_json(completion: Completion, text: TextModel | None) -> dict[str, Any]:
    fields = asdict(completion)
    fields["logprobs"] = [logprob._asdict() for logprob in completion.logprobs]
    fields["token_s"] = [round(seconds, 6) for seconds in completion.token_s]
    return fields | ({"text": text.decode(completion.tokens)} if text else {})
