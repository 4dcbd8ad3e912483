"""Split a dataset into K clusters, one per expert (DDM 4.1): features -> fine -> coarse k-means.

The result is one file: who belongs where, and the fingerprint of the data, which every later step
is checked against.

    python -m ddm_min.partition --data digits --clusters 4 --run runs/digits

With --export DIR, every island gets a folder of its own pictures and needs nothing else:

    python train_expert.py --data folder:DIR/cluster_2 --classes DIR/classes.json --cluster 2 ...
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm_min import data, features, kmeans
from ddm_min.cli import data_arguments, not_negative, one_sentence_errors, positive
from ddm_min.data import Dataset
from ddm_min.expert import described_by, read_file, replacing, write_file

SMALL_SHARD = 32  # fewer images than a usual batch


@dataclass
class Partition:
    """assignment int64 [N]: cluster of each image; counts [K, C]: images per cluster and class."""

    assignment: Tensor
    counts: Tensor
    class_names: list[str]
    data_fingerprint: str
    features: str
    seed: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the data and of who belongs where: experts and router carry it."""
        digest = hashlib.sha256(self.data_fingerprint.encode())
        digest.update(self.assignment.numpy().tobytes())
        return digest.hexdigest()

    @property
    def num_clusters(self) -> int:
        """K; clusters are numbered from 0, the largest first."""
        return len(self.counts)

    def check_cluster(self, name: str) -> int:
        """ "2" -> 2. Raises ValueError with the valid range."""
        if name.isdecimal() and int(name) < self.num_clusters:
            return int(name)
        raise ValueError(f"there is no cluster {name!r}: use 0 to {len(self.counts) - 1}, or all")

    def save(self, path: Path) -> None:
        """Write RUN/partition.safetensors."""
        metadata = dict(vars(self))
        tensors = {name: metadata.pop(name) for name in ("assignment", "counts")}
        write_file(path, "partition", tensors, metadata)

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> "Partition":
        """Read it for this dataset. Raises ValueError if it was made for another one."""
        tensors, metadata = read_file(path, "partition")
        with described_by(path, "a partition"):
            names = ("class_names", "data_fingerprint", "features", "seed")
            made = cls(**tensors, **{name: metadata[name] for name in names})
            assignment, sizes = made.assignment, made.counts.sum(1)
            valid = assignment.min() >= 0 and assignment.max() < len(sizes)
            if not (valid and torch.equal(assignment.bincount(minlength=len(sizes)), sizes)):
                raise ValueError("counts and assignment differ")
        if made.data_fingerprint != dataset.fingerprint():
            raise ValueError(f"{path} was made for other data: use the same --data or a new --run")
        return made


def feature_points(dataset: Dataset, name: str) -> np.ndarray:
    """Features as float32 [N, D]; of many images, in an unnamed file in $TMPDIR."""
    if len(dataset) <= kmeans.LARGE:
        return torch.cat([*features.extract(dataset.images, name)]).numpy()
    with tempfile.TemporaryFile() as file:
        for batch in features.extract(dataset.images, name):
            file.write(batch.float().numpy())
        file.flush()
        return np.memmap(file, np.float32, "r+").reshape(len(dataset), -1)


def partition(dataset: Dataset, k: int, name: str, fine: int | None, seed: int) -> Partition:
    """Assign every image to one of k clusters. Raises ValueError if there cannot be k of them.

    name: one of features.NAMES, or "labels" (classes dealt out to clusters) or "random"
    (DDM figure 4c: clearly worse), for comparison.
    """
    if name == "random":
        assignment = np.random.default_rng(seed).permutation(len(dataset)) % k
    elif name == "labels":
        assignment = dataset.labels.numpy() % k
    else:
        assignment = kmeans.two_stage(feature_points(dataset, name), k, fine, seed)
    assignment = torch.from_numpy(kmeans.canonical(assignment, k))
    num_rows = max(dataset.num_classes, 1)
    pairs = assignment * num_rows + dataset.labels
    counts = pairs.bincount(minlength=k * num_rows).reshape(k, num_rows)
    return Partition(assignment, counts, dataset.class_names, dataset.fingerprint(), name, seed)


def export(dataset: Dataset, made: Partition, folder: Path) -> None:
    """Write cluster_k/CLASS/*.png of every cluster, and classes.json: the numbers of classes."""
    if dataset.images.dtype != torch.uint8 or dataset.images.shape[1] not in (1, 3):
        raise ValueError("only pictures can be exported: give each island an npz file of its rows")
    names = dataset.class_names or ["."]
    for row, label in enumerate(dataset.labels.tolist()):
        place = folder / f"cluster_{made.assignment[row]}" / names[label]
        data.write_image(dataset.images[torch.tensor(row)], place / f"{row:08d}.png")
    description = dict(class_names=dataset.class_names, image_shape=[*dataset.images.shape[1:]])
    description |= dict(counts=made.counts.tolist(), fingerprint=made.fingerprint)
    with replacing(folder / "classes.json") as temporary:
        temporary.write_text(json.dumps(description))


def exported_shard(dataset: Dataset, file: Path, cluster: str) -> tuple[Dataset, int, str]:
    """(shard, number of its cluster, fingerprint of the partition) from one exported folder.

    Labels get the numbers of the whole class list, also where the shard lacks classes. Raises
    ValueError if these are not the pictures that were exported for this cluster.
    """
    with described_by(file, "an exported partition"):
        stored = json.loads(file.read_text())
        names, counts, fingerprint = (stored[x] for x in ("class_names", "counts", "fingerprint"))
        shape = list(stored["image_shape"])
        # Gray pictures are read as three equal channels, of which the first remains.
        images = data.Rows(dataset.images, torch.arange(len(dataset)), channels=shape[0])
        clusters = [dict(zip(names or [""], row, strict=True)) for row in counts]
    if not cluster.isdecimal() or int(cluster) >= len(clusters):
        raise ValueError(f"{file} has no cluster {cluster!r}, but {len(clusters)}, from 0")
    k = int(cluster)
    found = dict(zip(dataset.class_names or [""], dataset.labels.bincount().tolist(), strict=True))
    expected = {name: number for name, number in clusters[k].items() if number}
    if found != expected or list(images.shape[1:]) != shape:
        is_and_should = f"images per class are {found} and should be {expected}, of shape {shape}"
        raise ValueError(f"--data is not cluster {k} of {file}: {is_and_should}")
    numbers = [names.index(name) for name in dataset.class_names] or [0]
    labels = torch.tensor(numbers)[dataset.labels]
    return Dataset(images, labels, names), k, str(fingerprint)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Split a dataset into K clusters and write RUN/partition.safetensors and RUN/clusters.png."""
    parser = argparse.ArgumentParser(prog="python -m ddm_min.partition", description=main.__doc__)
    data_arguments(parser)
    parser.add_argument("--clusters", type=positive, required=True, help="K, the number of experts")
    parser.add_argument("--run", type=Path, required=True, help="folder of this ensemble")
    parser.add_argument("--features", default="pixels", help=features.NAMES + ", labels, random")
    parser.add_argument("--fine", type=positive, help="fine centroids; default min(1024, N / 10)")
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--export", type=Path, help="also write a folder of pictures per island")
    args = parser.parse_args(argv)

    dataset = data.load(args.data, args.image_size)
    made = partition(dataset, args.clusters, args.features, args.fine, args.seed)
    file = args.run / "partition.safetensors"
    if file.exists() and not torch.equal(Partition.load(file, dataset).assignment, made.assignment):
        raise ValueError(f"{file} holds another split, that experts rest on: use another --run")
    made.save(file)
    if args.export:
        export(dataset, made, args.export)
        print(f"wrote {args.export}/cluster_0 to {made.num_clusters - 1} and classes.json")
    for k, counts in enumerate(made.counts):
        pairs = zip(made.class_names, counts.tolist(), strict=False)  # no pairs without classes
        classes = {name: number for name, number in pairs if number}
        print(f"cluster {k}: {int(counts.sum())} images " + json.dumps(classes))
        if counts.sum() < SMALL_SHARD:
            print(f"warning: cluster {k} is too small to train an expert well", file=sys.stderr)
    from ddm_min import figures  # here, because it imports this module

    figures.clusters(dataset, made, args.run / "clusters.png")
    print(f"wrote {file} and {args.run / 'clusters.png'}")


if __name__ == "__main__":
    main()
