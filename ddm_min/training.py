"""The one training loop: for experts, routers and students alike, given the loss of a batch.

Every step's randomness comes from a generator seeded by (seed, step), so that step 1,000 is the
same step whether or not the run was interrupted before it. The average of the weights,

    ema <- decay ema + (1 - decay) weights,    decay = min(ema_decay, (1 + step) / (10 + step)),

is what is sampled and shipped; the warm-up of its decay lets short runs forget their start.

Several processes may train one model together (torchrun): each draws the whole batch, so all draw
the same, and takes its rows of it (`my_share`). The batch and the losses are those of one process.
"""

import copy
import json
import math
import os
import platform
import signal
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ddm_min.data import Dataset, to_float
from ddm_min.expert import check_writable, described_by, part, read_file, with_prefix, write_file

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVE_EVERY = 200  # times what the last save took: saving costs about 0.5 % of the time


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation settings. lr_schedule: "constant" (DDM) or "cosine" to zero, after warm-up."""

    steps: int
    batch_size: int = 32
    lr: float = 8e-3
    lr_schedule: str = "cosine"
    warmup: int = 100
    weight_decay: float = 0.0
    ema_decay: float = 0.9999
    clip: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0

    @classmethod
    def of(cls, args: Namespace) -> "TrainConfig":
        """The fields of parsed `cli.training_arguments`."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then constant or half a cosine down to zero at `steps`."""
        rate = self.lr * min(1.0, (step + 1) / max(self.warmup, 1))
        if self.lr_schedule == "cosine":
            rate *= (1 + math.cos(math.pi * step / self.steps)) / 2
        return rate


def draw_batch(
    dataset: Dataset, batch_size: int, rng: np.random.Generator, flip: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(x0 in [-1, 1] [B, C, H, W], labels [B], rows [B]): drawn with replacement, as one gather."""
    rows = torch.from_numpy(rng.integers(len(dataset), size=batch_size)).to(dataset.labels.device)
    x0, labels = to_float(dataset.images[rows]), dataset.labels[rows]
    if flip:
        mirrored = torch.from_numpy(rng.random(batch_size) < 0.5).to(x0.device)
        x0 = torch.where(mirrored[:, None, None, None], x0.flip(-1), x0)
    return x0, labels, rows


def rank_and_world() -> tuple[int, int]:
    """(number of this process, how many train this model together): (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def my_share(*batch: Tensor) -> tuple[Tensor, ...]:
    """This process's rows of what all processes have drawn alike."""
    rank, world = rank_and_world()
    return tuple(rows.chunk(world)[rank] for rows in batch)


def average(value: float, device: torch.device) -> float:
    """The mean of a number over the processes that train together."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float32, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def resume_file(file: Path) -> Path:
    """RUN/expert_0.safetensors -> RUN/resume/expert_0.safetensors."""
    return file.parent / "resume" / file.name


def describe(args: Namespace, fingerprint: str) -> dict:
    """The arguments that decide a result: all but the places where things lie."""
    places = ("data", "run", "device", "classes", "compile")
    plain = {name: value for name, value in vars(args).items() if name not in places}
    return json.loads(json.dumps(plain | {"data": fingerprint}))  # as a resume file gives them back


def environment(device: str) -> dict:
    """What besides the arguments decides the last bits of a result."""
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def compile_in_place(model: nn.Module) -> None:
    """torch.compile, of which the names of the weights know nothing.

    Raises ValueError where there is no compiler, which shows on the first call of anything.
    """
    try:
        torch.compile(torch.square)(torch.ones(1, device=next(model.parameters()).device))
    except Exception as error:  # g++, Triton, headers of Python: each missing in its own way
        reason = textwrap.shorten(str(error), 200)
        raise ValueError(
            f"--compile finds no working compiler ({reason}): install g++, or leave --compile out"
        ) from None
    model.compile()


class Stopper:
    """Turns Ctrl-C and SIGTERM into a request that the loop answers between two steps."""

    def __enter__(self) -> "Stopper":
        self.requested = False
        self.earlier = {s: signal.signal(s, self.request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def request(self, *_) -> None:
        """The signal handler: remember, and return to the step that is under way."""
        self.requested = True

    def __exit__(self, *_) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)


@dataclass
class State:
    """All that changes while training, and so all that a resume file holds."""

    model: nn.Module
    ema: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    losses: list[float]

    def save(self, file: Path, arguments: dict, environment: dict) -> None:
        """Write RUN/resume/<name>.safetensors."""
        optimizer = self.optimizer.state_dict()["state"]
        tensors = with_prefix("model", self.model.state_dict())
        tensors |= with_prefix("ema", self.ema.state_dict())
        for index, moments in optimizer.items():
            tensors |= with_prefix(f"optimizer.{index}", moments)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise FloatingPointError(f"weights are no longer finite: {file} stays as it was")
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float32)
        metadata = {"step": len(self.losses), "arguments": arguments, "environment": environment}
        write_file(file, "resume", tensors, metadata | {"scaler": self.scaler.state_dict()})

    def load(self, tensors: dict[str, Tensor], metadata: dict) -> None:
        """The inverse of `save`."""
        self.model.load_state_dict(part("model", tensors))
        self.ema.load_state_dict(part("ema", tensors))
        state = self.optimizer.state_dict()
        self.losses = tensors["losses"].flatten().tolist()
        if self.losses:
            for index, weight in enumerate(self.model.parameters()):
                moments = state["state"][index] = part(f"optimizer.{index}", tensors)
                shapes = {name: moment.shape for name, moment in moments.items()}
                if shapes != {"step": (), "exp_avg": weight.shape, "exp_avg_sq": weight.shape}:
                    raise ValueError("the optimizer's moments do not fit the weights")
        self.optimizer.load_state_dict(state)
        self.scaler.load_state_dict(metadata["scaler"])


def check_same(file: Path, stored: dict, given: dict, config: TrainConfig) -> None:
    """Refuse to go on with what would change the result. Raises ValueError that lists it.

    Only `steps` may grow, and only where the learning rate of earlier steps does not depend on it.
    """
    different = {
        name: f"{name} was {stored.get(name)} and is {given.get(name)}"
        for name in stored.keys() | given.keys()
        if stored.get(name) != given.get(name)
    }
    before, after = stored.get("steps"), given.get("steps")
    if config.lr_schedule == "constant" and isinstance(before, int) and (after or 0) > before:
        del different["steps"]
    if different:
        depends = "steps" in different and config.lr_schedule == "cosine"
        hint = " (the cosine learning rate depends on steps)" if depends else ""
        raise ValueError(
            f"{file} belongs to another run: {'; '.join(sorted(different.values()))}{hint}. "
            f"Use the earlier values, or delete the file to start anew"
        )


def train(
    model: nn.Module,
    batch_loss: Callable[[nn.Module, np.random.Generator], Tensor],
    config: TrainConfig,
    file: Path,
    arguments: dict,
) -> tuple[nn.Module, list[float]]:
    """Minimise batch_loss(model, rng) and return (EMA model, loss of every step).

    file: the resume file. arguments: what decides the result; an interrupted run goes on only if
    they are the same. Raises FloatingPointError at the first loss or gradient that is not finite;
    the resume file then still holds the last good state. Of several processes, only the first
    returns and writes; the others end here.
    """
    (rank, world), device = rank_and_world(), next(model.parameters()).device
    if config.precision == "fp16" and device.type == "cpu":
        raise ValueError("fp16 training needs a GPU: use --precision fp32 or bf16 on the CPU")
    if config.batch_size % world:
        raise ValueError(f"{config.batch_size} images do not divide among {world} processes")
    check_writable(file.parent)
    settings = dict(lr=config.lr, weight_decay=config.weight_decay, fused=device.type != "mps")
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = State(model, ema, optimizer, scaler, losses=[])
    name, here = file.stem, environment(device.type) | {"compile": config.compile}
    if file.exists():
        tensors, metadata = read_file(file, "resume")
        with described_by(file, "a training state"):
            stored, state_of = dict(metadata["arguments"]), dict(metadata["environment"])
        check_same(file, stored, arguments, config)
        with described_by(file, "a training state"):
            state.load(tensors, metadata)
        if len(state.losses) < config.steps:
            check_same(file, state_of, here, config)
            news = f"goes on at step {len(state.losses)}"
        else:
            news = f"all {config.steps} steps were done earlier, nothing to train"
        if rank == 0:
            print(f"{name}: {news}")

    first, network = len(state.losses), model
    if config.compile and first < config.steps:
        compile_in_place(model)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if average(first, device) != first:
            raise ValueError(f"the processes see different files {file}: use a shared disk")
        network = DistributedDataParallel(model)
    precision = PRECISIONS[config.precision]
    autocast = torch.autocast(device.type, precision, enabled=precision is not None)
    parameters, averages = list(model.parameters()), list(ema.parameters())
    last_save, save_seconds = time.monotonic(), 0.1
    progress = tqdm(total=config.steps, initial=first, desc=name, mininterval=0.5, disable=rank > 0)
    model.train()
    with Stopper() as stopper, progress:
        while len(state.losses) < config.steps and not average(stopper.requested, device):
            step = len(state.losses)
            for group in optimizer.param_groups:
                group["lr"] = config.lr_at(step)

            with autocast:
                loss = batch_loss(network, np.random.default_rng((2, config.seed, step)))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, config.clip)
            loss = average(loss.item(), device)
            # fp16 gradients may overflow: the scaler then skips the step and lowers its scale.
            if not (math.isfinite(loss) and (norm.isfinite() or scaler.is_enabled())):
                raise FloatingPointError(
                    f"{name}: loss {loss:g} and gradient norm {norm:g} at step {step}: training "
                    f"stops; try a lower --lr, or --precision fp32"
                )
            scaler.step(optimizer)
            scaler.update()
            decay = min(config.ema_decay, (1 + step) / (10 + step))
            with torch.no_grad():  # or the average would drag a graph of all steps behind it
                torch._foreach_lerp_(averages, parameters, 1 - decay)

            state.losses.append(loss)
            progress.set_postfix(loss=f"{np.mean(state.losses[-100:]):.4f}", refresh=False)
            progress.update()
            if rank == 0 and time.monotonic() - last_save > SAVE_EVERY * save_seconds:
                start = time.monotonic()
                state.save(file, arguments, here)
                last_save, save_seconds = time.monotonic(), time.monotonic() - start
        if world > 1:
            dist.destroy_process_group()
        if rank > 0:
            sys.exit()  # what is left is to write the files, once
        if len(state.losses) > first:
            state.save(file, arguments, here)
    if len(state.losses) < config.steps:
        news = f"stopped after step {len(state.losses)}; the same command goes on from there"
        print(f"{name}: {news}")
        sys.exit(130)
    return ema.eval(), state.losses
