"""An expert as one self-describing file, and how any file of this project is written and read.

A file is a safetensors archive: tensors, and one metadata entry `ddm_min` that holds everything
else as JSON, with a checksum of it all. It is written whole or not at all: to a temporary file,
flushed to the disk, renamed.
"""

import json
import os
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddm_min.dit import DiT, DiTConfig
from ddm_min.objectives import Objective
from ddm_min.router import LearnedRouter, ShardStats
from ddm_min.schedule import schedule_from_dict, schedule_to_dict

FORMAT_VERSION = 1
MOST_CLUSTERS = 100_000  # a cluster beyond this is no cluster but damage


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which becomes `path` when the block ends without an error.

    Flushed to the disk before the rename, so `path` is at any moment the old file or the new one.
    What an earlier process left when it was killed in here is removed: one at a time may write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.stem}.*.tmp{path.suffix}"):
        leftover.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Raise OSError now, and not after the work, if nothing can be written to this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def checksum(text: str, tensors: dict[str, Tensor]) -> int:
    """CRC-32 of all that a file holds, by which a flipped bit is noticed."""
    crc = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def write_file(path: Path, kind: str, tensors: dict[str, Tensor], metadata: dict) -> None:
    """Write tensors and metadata to `path`, atomically; an earlier file stays until then."""
    metadata = {"format_version": FORMAT_VERSION, "kind": kind, **metadata}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(metadata | {"crc32": checksum(json.dumps(metadata), tensors)})
    try:
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"ddm_min": text})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"cannot write {path}: {error}") from None


def read_file(path: Path, kind: str) -> tuple[dict[str, Tensor], dict]:
    """Read (tensors, metadata) of a file of this kind. Raises ValueError that names the file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no {kind} file {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(json.loads(file.metadata()["ddm_min"]))
            version, found = int(metadata["format_version"]), metadata["kind"]
            ours = version <= FORMAT_VERSION and found == kind
            tensors = {name: file.get_tensor(name) for name in file.keys()} if ours else {}
        crc = metadata.pop("crc32", None)  # None: of another writer, and read unchecked
        if ours and crc not in (None, checksum(json.dumps(metadata), tensors)):
            raise ValueError("its checksum differs")
    except Exception as error:  # a damaged file can make safetensors, json and torch raise anything
        raise ValueError(
            f"{path} is damaged or not a ddm_min file ({textwrap.shorten(str(error), 200)}): "
            f"make it again"
        ) from None
    if version > FORMAT_VERSION:
        raise ValueError(f"{path} has format {version}, not up to {FORMAT_VERSION}: update ddm_min")
    if not ours:
        raise ValueError(f"{path} is a {found} file, not a {kind} file")
    return tensors, metadata


@contextmanager
def described_by(path: Path, what: str) -> Iterator[None]:
    """Contents that do not fit each other can raise nearly anything: name the file, in one line."""
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(str(error), 200)
        raise ValueError(f"{path} does not describe {what} ({reason})") from None


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """{"a": x} -> {"model.a": x}."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """{"model.a": x, "stats.b": y} -> {"a": x}: the inverse of `with_prefix`."""
    start = prefix + "."
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}


@dataclass
class Expert:
    """What an island sends: a network, what it predicts, and what it answers for.

    cluster: an index or "all". time_interval: (a, b] on the linear path. stats: of the data it was
    trained on, or None. fingerprint: of the partition, "" without one. label_dropout: 0 means that
    it never saw the null class, so guidance is meaningless. latents: trained on floats, not pixels.
    """

    model: DiT
    objective: Objective
    cluster: int | str = "all"
    time_interval: tuple[float, float] = (0.0, 1.0)
    stats: ShardStats | None = None
    class_names: list[str] = field(default_factory=list)
    fingerprint: str = ""
    label_dropout: float = 0.0
    step: int = 0
    seed: int = 0
    latents: bool = False

    def __post_init__(self):
        low, high = self.time_interval
        if not 0 <= low < high <= 1:
            raise ValueError(f"time interval {low:g} to {high:g}: use 0 <= A < B <= 1")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return (self.model.config.in_channels, *self.model.config.image_size)

    @property
    def file_name(self) -> str:
        """expert_2.safetensors, expert_all_0-0.33.safetensors."""
        interval = "" if self.time_interval == (0, 1) else "_{:g}-{:g}".format(*self.time_interval)
        return f"expert_{self.cluster}{interval}.safetensors"

    @property
    def metadata(self) -> dict:
        """Everything but the tensors, in plain types."""
        elsewhere = ("model", "objective", "stats")
        plain = {name: value for name, value in vars(self).items() if name not in elsewhere}
        objective = asdict(self.objective) | {"schedule": schedule_to_dict(self.objective.schedule)}
        return plain | {"config": asdict(self.model.config), "objective": objective}

    def save(self, path: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write everything to one file. Raises OSError if it cannot be written.

        weights: those to write, where the model only has shapes (convert_ckpt); None: its own.
        """
        tensors = with_prefix("model", weights or self.model.state_dict())
        if self.stats is not None:
            tensors |= with_prefix("stats", vars(self.stats))
        write_file(Path(path), "expert", tensors, self.metadata)

    @classmethod
    def load(cls, path: Path, device: str = "cpu") -> "Expert":
        """Read an expert for sampling. Raises ValueError, naming the file and what is wrong."""
        tensors, metadata = read_file(path, "expert")
        with described_by(path, "an expert"):
            model = build(DiT, metadata, part("model", tensors), device)
            stats = {name: x.to(device) for name, x in part("stats", tensors).items()}
            return cls.of(model, metadata, stats)

    @classmethod
    def of(cls, model: DiT, metadata: dict, stats: dict[str, Tensor]) -> "Expert":
        """A model, and what a file says of it: the inverse of `metadata`."""
        stored = metadata["objective"]
        objective = Objective(**stored | {"schedule": schedule_from_dict(stored["schedule"])})
        known = {f.name: metadata[f.name] for f in fields(cls) if f.name in metadata}
        known |= {"time_interval": tuple(known["time_interval"]), "objective": objective}
        texts, cluster = [*known["class_names"], known["fingerprint"]], known["cluster"]
        valid = cluster == "all" or cluster in range(MOST_CLUSTERS)
        if not valid or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"cluster {cluster!r}, class names or fingerprint make no sense")
        return cls(**known | {"model": model, "stats": ShardStats(**stats) if stats else None})


def build(network, metadata: dict, weights: dict[str, Tensor], device: str, *arguments):
    """A network of the stored shape with these weights, ready to be sampled.

    It is made without memory first: a damaged file may ask for any size.
    """
    config = DiTConfig(**metadata["config"])
    if config.depth > len(weights):
        raise ValueError(f"{len(weights)} tensors cannot be {config.depth} blocks")
    with torch.device("meta"):
        network(config, *arguments).load_state_dict(weights, assign=True)  # raises if they differ
    model = network(config, *arguments)
    model.load_state_dict(weights)
    return model.to(device).eval().requires_grad_(False)


def save_router(path: Path, router: LearnedRouter, counts: Tensor, **metadata) -> None:
    """RUN/router.safetensors: the router and, per cluster and class, how many images there are."""
    tensors = with_prefix("model", router.state_dict()) | {"counts": counts}
    metadata |= {"config": asdict(router.config), "num_clusters": router.num_clusters}
    write_file(Path(path), "router", tensors, metadata)


def load_router(path: Path, device: str = "cpu") -> tuple[LearnedRouter, Tensor, dict]:
    """(router, counts [K, C], metadata). Raises ValueError, naming the file and what is wrong."""
    tensors, metadata = read_file(path, "router")
    with described_by(path, "a router"):
        weights = part("model", tensors)
        router = build(LearnedRouter, metadata, weights, device, metadata["num_clusters"])
        counts = tensors["counts"]
        if counts.ndim != 2 or len(counts) != router.num_clusters:
            raise ValueError(f"counts {tuple(counts.shape)} for {router.num_clusters} clusters")
        return router, counts.to(device), metadata | {"fingerprint": str(metadata["fingerprint"])}
