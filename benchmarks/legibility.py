"""Does an independent classifier see the digit that was asked for?

    python benchmarks/legibility.py runs/digits/samples.npz

A support vector machine with an RBF kernel, which shares nothing with the diffusion models, is
fitted to two thirds of the real digits. Printed: its accuracy on the other third, the limit of what
it can say, and on the samples, in all and by class.
"""

import sys

import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from ddm_min import data


def main(file: str) -> None:
    real, samples = data.load("digits"), data.load(f"npz:{file}")
    x, y = real.images.flatten(1).numpy() / 255, real.labels.numpy()
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=1 / 3, random_state=0)
    classifier = SVC(C=10, gamma="scale").fit(x_train, y_train)
    asked = samples.labels.numpy()
    agrees = classifier.predict(samples.images.flatten(1).numpy() / 255) == asked
    print(f"real digits held back: {classifier.score(x_test, y_test):.1%} of {len(x_test)}")
    print(f"samples:               {agrees.mean():.1%} of {len(asked)}")
    by_class = {real.class_names[k]: f"{agrees[asked == k].mean():.0%}" for k in np.unique(asked)}
    print("by class:", by_class)


if __name__ == "__main__":
    main(sys.argv[1])
