"""k-means in two stages (DDM 4.1): many fine centroids, merged into K coarse ones.

The fine ones follow the shape of the data; K coarse ones are found among them, weighted by their
size; every point goes to the nearest coarse one. Everything runs in one thread, because sums taken
in another order can move a point across a border, and the same data must give the same clusters.
Of more than LARGE points only mini-batches are read at a time, so they may lie on the disk.
"""

import numpy as np
import torch

LARGE = 10_000  # points beyond this are clustered by mini-batches
BATCH = 8192  # points in memory at a time


def kmeans(points: np.ndarray, k: int, weights: np.ndarray | None, seed: int) -> np.ndarray:
    """The k centroids of points [N, D], with scikit-learn's k-means++ and Lloyd or mini-batches."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    method = KMeans(k, n_init=4, random_state=seed)
    if len(points) > LARGE:
        passes = max(3, 100 * BATCH // len(points))  # at least 100 steps
        sizes = dict(batch_size=BATCH, init_size=max(BATCH, 10 * k), max_iter=passes, n_init=1)
        method = MiniBatchKMeans(k, **sizes, compute_labels=False, random_state=seed)
    with threadpool_limits(1):
        return method.fit(points, sample_weight=weights).cluster_centers_


def nearest(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Index of the nearest centroid, [N, D] and [K, D] -> [N]."""
    ends, found = torch.from_numpy(centroids).to(torch.float32), []
    for start in range(0, len(points), BATCH):
        distances = torch.cdist(torch.from_numpy(points[start : start + BATCH]), ends)
        found.append(distances.argmin(1).numpy())
    return np.concatenate(found)


def two_stage(points: np.ndarray, k: int, fine: int | None, seed: int) -> np.ndarray:
    """Cluster of each point [N]: fine k-means, then k-means of its centroids weighted by size.

    fine: how many centroids; None: min(1024, N / 10). Raises ValueError for less than k different
    points (of many, LARGE are looked at).
    """
    distinct = len(np.unique(points[:: -(-len(points) // LARGE)], axis=0))
    if distinct < k:
        raise ValueError(f"{k} clusters of only {distinct} different images: ask for fewer")
    fine = min(max(fine or min(1024, len(points) // 10), k), distinct)
    fine_centroids = kmeans(points, fine, None, seed)
    sizes = np.bincount(nearest(points, fine_centroids), minlength=fine)
    filled = sizes > 0
    coarse = kmeans(fine_centroids[filled].astype(np.float32), k, sizes[filled], seed)
    return nearest(points, coarse)


def canonical(assignment: np.ndarray, k: int) -> np.ndarray:
    """The same clusters with the largest first, so that the same split has the same numbers.

    Raises ValueError if one of the k is empty.
    """
    sizes = np.bincount(assignment, minlength=k)
    if (sizes == 0).any():
        filled = np.count_nonzero(sizes)
        raise ValueError(f"only {filled} of {k} clusters got images: ask for fewer")
    return np.argsort(np.argsort(-sizes, kind="stable"))[assignment]
