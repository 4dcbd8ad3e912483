"""What the command lines share: one-sentence errors, the choice of device, checked numbers."""

import argparse
import functools
import os
import sys
from collections.abc import Callable

import torch

from ddm_min.data import NAMES


def one_sentence_errors(main: Callable) -> Callable:
    """What a user can cause ends as one sentence and exit code 2, without a traceback.

    The library raises ValueError, OSError or FloatingPointError for these, with that sentence.
    """

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> None:
        """`main`, whose errors of a user's making end in exit code 2, and Ctrl-C in 130."""
        try:
            main(argv)
        except (ValueError, OSError, FloatingPointError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None

    return guarded


def device(name: str) -> str:
    """argparse type: "auto" is cuda, else mps, else cpu. Refuses what is not there."""
    if name == "auto" and not torch.cuda.is_available():
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if name in ("auto", "cuda"):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # under torchrun, one GPU per process
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"this machine has no device {name!r}") from None
    return name


def positive(text: str) -> int:
    """argparse type: an integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def not_negative(text: str) -> int:
    """argparse type: an integer from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def amount(text: str) -> float:
    """argparse type: a finite number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number from 0")
    return value


def share(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    value = amount(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def data_arguments(parser) -> None:
    """--data and --image-size, with which `data.load` is called."""
    parser.add_argument("--data", default="digits", help=NAMES)
    parser.add_argument("--image-size", type=positive, help="resize pictures of folder:DIR")


def training_arguments(parser: argparse.ArgumentParser, **defaults) -> None:
    """The arguments that training an expert and training a router share; see TrainConfig."""
    how = parser.add_argument_group("optimisation")
    add = how.add_argument
    add("--steps", type=positive, default=defaults["steps"])
    add("--batch-size", type=positive, default=defaults["batch_size"])
    add("--lr", type=amount, default=defaults["lr"], help="AdamW; default 8e-3, for tiny")
    add("--lr-schedule", default="cosine", choices=("cosine", "constant"))
    add("--warmup", type=not_negative, default=100, help="steps of rising learning rate")
    add("--weight-decay", type=amount, default=0.0)
    add("--ema-decay", type=share, default=0.9999, help="of the weights that are shipped")
    add("--clip", type=amount, default=1.0, help="largest gradient norm")
    add("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    add("--compile", action="store_true", help="torch.compile: needs a C++ compiler")
    add("--flip", action="store_true", help="mirror half of the images (not digits!)")
    add("--seed", type=not_negative, default=0)
    add("--device", type=device, default="auto", help="auto, cuda, mps or cpu")
