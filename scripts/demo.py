"""Starts a gang on a trained model, generates for a few prompts through engine_stub, and leaves nothing behind.

The last line is one JSON object: completions (what was generated, in the order of the prompts), tokens_per_second (of
all requests together), ranks.
"""

try:
    import argparse
    import json
    import os
    import shlex
    import signal
    import sys
    import time
    from pathlib import Path

    from engine_stub.engine import Engine, StepRejected
    from engine_stub.request import Params
    from engine_stub.text import TextModel
    from fetch_model import FetchError, fetch_model
    from gang import LAUNCHERS, GangError, launch_command, running_gang
    from screen import Screen, draw_table, heading
    from workerproto.client import Client, ClientError
    from workerproto.rundir import endpoint_of
except KeyboardInterrupt:  # Ctrl-C so early: no traceback of imports
    raise SystemExit(130) from None

# What the gang is to have room for: its start runs the largest step once, to know its memory.
SIZES = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
PROMPTS = ["The capital of France is", "Once upon a time", "The three primary colors are"]


def main() -> None:
    args = parse_arguments()
    prompts = args.prompt or PROMPTS
    model = args.model or fetch_model()
    text = TextModel(model)
    encoded = [text.encode(prompt) for prompt in prompts]
    if not all(encoded):
        raise ValueError("a prompt of no tokens cannot be completed")
    name = f"demo-{os.getpid()}"
    command = launch_command(args.launcher, name, model, args.tp, args.pp, "--device", args.device, *SIZES)
    ranks = args.tp * args.pp
    heading(f"Starting {ranks} rank{'s' if ranks > 1 else ''}", shlex.join([Path(command[0]).name, *command[1:]]))
    with running_gang(command, name), Client(endpoint_of(name, os.environ), name="demo") as client:
        heading(f"Generating for {len(prompts)} prompt{'s' if len(prompts) > 1 else ''} at once, greedily")
        params = Params(args.max_tokens, stop_tokens=text.stop_tokens)
        screen = Screen(prompts, text, params, name)
        engine = Engine(client)
        started = time.perf_counter()
        completions = engine.generate(encoded, params, screen.on_token)
        seconds = time.perf_counter() - started
        screen.end()
    tokens_per_second = round(sum(len(completion.tokens) for completion in completions) / seconds, 1)
    draw_table(prompts, completions, tokens_per_second)
    texts = [text.decode(completion.tokens) for completion in completions]
    print(json.dumps({"completions": texts, "tokens_per_second": tokens_per_second, "ranks": ranks}), flush=True)


def parse_arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    ap.add_argument("--tp", type=positive, default=1, metavar="T", help="ranks that share each layer (default: 1)")
    ap.add_argument("--pp", type=positive, default=2, metavar="P", help="stages that share the layers (default: 2)")
    ap.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times (default: three)")
    ap.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face folder (default: SmolLM2-135M, fetched)")
    ap.add_argument("--launcher", choices=LAUNCHERS, default=LAUNCHERS[0], help=f"(default: {LAUNCHERS[0]})")
    ap.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank (default: cpu)")
    ap.add_argument("--max-tokens", type=positive, default=48, metavar="N", help="for each prompt (default: 48)")
    args = ap.parse_args()
    if args.model and not args.model.is_dir():
        ap.error(f"--model {str(args.model)!r} is not a folder")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def run() -> int:
    """Return the exit code: 0, the gang's own where it failed, 128 + the signal's number where one came."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # unwinds, and so ends the gang
    try:
        main()
    except GangError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read it has seen enough; the gang is ended
        drop_output()
        return 0
    except (ClientError, FetchError, OSError, StepRejected, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        drop_output()
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing runs on", file=sys.stderr)
        return 130
    return 0


def drop_output() -> None:
    """If it takes nothing more: what is left for it could only fail again, at the interpreter's end."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(run())
