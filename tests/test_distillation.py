"""Distillation against exact teachers: its target is right per image, and its minimum is eq. 4."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sample
import train_expert
from ddm_min import partition
from ddm_min.analytic import EmpiricalFlow
from ddm_min.conversion import matching_point
from ddm_min.data import load, to_float
from ddm_min.distillation import believed_pair
from ddm_min.expert import Expert
from ddm_min.objectives import DDPM, FLOW, NAMED, Objective, target
from ddm_min.router import ShardStats
from ddm_min.schedule import Betas, Cosine, Linear, add_noise, expand

SCHEDULES = [Linear(), Cosine(), Betas.ddpm()]
TEACHERS = [FLOW, DDPM, NAMED["x0"]]  # one per shard, each trained otherwise
SHORT = ["--steps", "3", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def world():
    """60 digits in three shards, an exact expert for each, and noise: all float64."""
    images = to_float(load("digits").images[:60]).double()
    clusters = torch.arange(60) % 3
    experts = [
        Expert(EmpiricalFlow(images[clusters == k], TEACHERS[k].schedule).expert(TEACHERS[k]),
               TEACHERS[k], k)
        for k in range(3)
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    eps = torch.randn(images.shape, generator=generator, dtype=torch.float64)
    t = 0.02 + 0.96 * torch.rand(60, generator=generator, dtype=torch.float64)
    return images, clusters, experts, eps, t


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_pair_is_the_posterior_mean_within_the_images_own_shard(world, schedule):
    images, clusters, experts, eps, t = world
    labels = torch.zeros(60, dtype=torch.long)
    x0_hat, eps_hat = believed_pair(experts, clusters, images, eps, t, labels, schedule)
    x_t = add_noise(images, eps, t, schedule)
    for k in range(3):
        rows = clusters == k
        exact = EmpiricalFlow(images[rows], schedule)
        wanted = exact.x0(x_t[rows], t[rows]), exact.eps(x_t[rows], t[rows])
        # 1 / alpha and 1 / sigma amplify rounding by at most 50 for t in [.02, .98], and Betas by
        # 1 / alpha(.98) = 150: 1e-11 leaves four digits for sums over 64 pixels and exp.
        torch.testing.assert_close(x0_hat[rows], wanted[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(eps_hat[rows], wanted[1], rtol=0, atol=1e-11)
    alpha, sigma = expand(schedule.alpha(t), x_t), expand(schedule.sigma(t), x_t)
    torch.testing.assert_close(alpha * x0_hat + sigma * eps_hat, x_t, rtol=0, atol=1e-12)


def test_the_best_student_is_the_mixture(world):
    """Given x_t the image is random, and with it the teacher: E[target | x_t] = eq. 4's velocity.

    The posterior over images is exact, so the expectation is a finite sum and no sampling is in it.
    """
    images, clusters, experts, eps, t = world
    whole = EmpiricalFlow(images, Linear())
    for row in range(0, 60, 7):
        # The same x_t reached from every image: eps is whatever makes up the difference.
        x_t = add_noise(images[row : row + 1], eps[row : row + 1], t[row : row + 1], Linear())
        same_t = t[row].expand(60)
        alpha, sigma = expand(1 - same_t, images), expand(same_t, images)
        eps_to = (x_t - alpha * images) / sigma
        labels = torch.zeros(60, dtype=torch.long)
        pair = believed_pair(experts, clusters, images, eps_to, same_t, labels, Linear())
        targets = target(*pair, same_t, FLOW)
        posterior = whole.log_weights(x_t, t[row : row + 1]).softmax(1)[0]
        mean = (expand(posterior, targets) * targets).sum(0)
        exact = whole.velocity(x_t, t[row : row + 1])[0]
        torch.testing.assert_close(mean, exact, rtol=0, atol=1e-10)


def test_time_interval_teachers_answer_by_noise_level(world):
    """A cosine student asks the expert of the linear path's interval at equal log-SNR."""
    images, _, _, eps, t = world
    exact = EmpiricalFlow(images, Linear()).expert(FLOW)
    asked = {}

    def remember(name):
        def model(x_t, times, labels):
            asked.setdefault(name, []).append(times)
            return exact(x_t, times, labels)

        return model

    parts = [Expert(remember(a), FLOW, "all", (a, b)) for a, b in ((0.0, 0.3), (0.3, 1.0))]
    zeros = torch.zeros(60, dtype=torch.long)
    believed_pair(parts, zeros, images, eps, t, zeros, Cosine())
    linear_t, _ = matching_point(Cosine(), Linear(), t)
    assert torch.equal(asked[0.0][0], linear_t[linear_t <= 0.3])
    assert torch.equal(asked[0.3][0], linear_t[linear_t > 0.3])
    assert not torch.equal(linear_t <= 0.3, t <= 0.3)  # in the cosine's own t: another split


def test_a_missing_teacher_is_named(world):
    images, clusters, experts, eps, t = world
    labels = torch.zeros(60, dtype=torch.long)
    with pytest.raises(ValueError, match="no expert answers for cluster 1"):
        believed_pair([experts[0], experts[2]], clusters, images, eps, t, labels, Linear())


def call(main, *words) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main([str(word) for word in words])
    return out.getvalue()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("teacher")
    call(partition.main, "--data", "digits", "--clusters", 2, "--fine", 8, "--run", run)
    for k, objective in enumerate(("ddpm", "flow")):
        words = ["--run", run, "--cluster", k, "--objective", objective, *SHORT]
        call(train_expert.main, *words)
    return run


@pytest.mark.parametrize("objective", ["flow", "ddpm"])
def test_command_trains_a_student_that_samples(teacher, tmp_path, objective):
    words = ["--run", tmp_path, "--cluster", "all", "--teacher", teacher, "--objective", objective]
    call(train_expert.main, *words, *SHORT)
    student = Expert.load(tmp_path / "expert_all.safetensors")
    assert student.cluster == "all" and student.objective == NAMED[objective]
    plain = tmp_path / "plain"
    call(train_expert.main, "--run", plain, "--cluster", "all", "--objective", objective, *SHORT)
    other = Expert.load(plain / "expert_all.safetensors")
    pairs = zip(student.model.parameters(), other.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)  # the teacher did change something
    call(sample.main, tmp_path, "--num", 4, "--num-steps", 2, "--out", tmp_path / "x.npz")


def test_a_teacher_of_zeros_is_learned(teacher, tmp_path):
    """A teacher that predicts velocity 0 believes in x0 = eps = x_t; its student stays at 0."""
    run = tmp_path / "zero"
    call(partition.main, "--data", "digits", "--clusters", 2, "--fine", 8, "--run", run)
    for k in (0, 1):
        expert = Expert.load(teacher / f"expert_{k}.safetensors")
        torch.nn.init.zeros_(expert.model.head.weight)
        torch.nn.init.zeros_(expert.model.head.bias)
        replace(expert, objective=FLOW, stats=None).save(run / f"expert_{k}.safetensors")
    words = ["--run", tmp_path / "out", "--cluster", "all", "--teacher", run, *SHORT]
    call(train_expert.main, *words)
    student = Expert.load(tmp_path / "out" / "expert_all.safetensors")
    # An untrained head is zero and so is its target, up to the rounding of x0_hat and eps_hat. Adam
    # moves by up to lr per step whatever the size of a gradient, so weights say little: outputs do.
    x_t, t = torch.randn(8, 1, 8, 8), torch.rand(8)
    assert student.model(x_t, t, torch.arange(8)).abs().max() < 1e-2
    call(train_expert.main, "--run", tmp_path / "free", "--cluster", "all", *SHORT)
    free = Expert.load(tmp_path / "free" / "expert_all.safetensors")
    assert free.model(x_t, t, torch.arange(8)).abs().max() > 1e-2


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as stopped:
        train_expert.main([str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_errors_are_one_sentence(teacher, tmp_path, capsys):
    common = ["--run", tmp_path, *SHORT]
    text = refused(capsys, "--run", teacher, *SHORT, "--cluster", 0, "--teacher", teacher)
    assert "--teacher needs --cluster all" in text and text.count("\n") == 1
    text = refused(capsys, *common, "--cluster", "all", "--teacher", tmp_path / "nowhere")
    assert "nowhere" in text and text.count("\n") == 1
    other = tmp_path / "other"
    call(
        partition.main, "--data", "digits", "--clusters", 2, "--features", "labels", "--run", other
    )
    for k in (0, 1):
        (other / f"expert_{k}.safetensors").write_bytes(
            (teacher / f"expert_{k}.safetensors").read_bytes()
        )
    text = refused(capsys, *common, "--cluster", "all", "--teacher", other)
    assert "another partition" in text and text.count("\n") == 1


def test_objective_of_the_pair_does_not_matter(world):
    """Whatever the student predicts, its target says the same (x0_hat, eps_hat)."""
    images, clusters, experts, eps, t = world
    labels = torch.zeros(60, dtype=torch.long)
    x0_hat, eps_hat = believed_pair(experts, clusters, images, eps, t, labels, Cosine())
    v = target(x0_hat, eps_hat, t, Objective("v", Cosine()))
    alpha, sigma = expand(Cosine().alpha(t), v), expand(Cosine().sigma(t), v)
    x_t = add_noise(images, eps, t, Cosine())
    torch.testing.assert_close(alpha * x_t - sigma * v, x0_hat, rtol=0, atol=1e-11)


def test_at_pure_noise_an_eps_teacher_believes_in_the_mean_of_its_class(world):
    """alpha = 0: eps says nothing about x0, and the shard's mean of the label stands in."""
    images, clusters, experts, eps, _ = world
    labels = torch.arange(60) // 3 % 2  # two classes in each shard
    with_stats = [
        replace(e, stats=ShardStats.measure(images[clusters == k], labels[clusters == k], 2))
        for k, e in enumerate(experts)
    ]
    asked = torch.where(torch.arange(60) < 30, labels, 2)  # half of them with the null label
    t = torch.ones(60, dtype=torch.float64)
    x0_hat, _ = believed_pair(with_stats, clusters, images, eps, t, asked, Linear(), 2)
    assert TEACHERS[1] == DDPM
    for row in range(1, 60, 3):  # the eps teacher's
        same = (clusters == 1) & ((labels == labels[row]) | (asked[row] == 2))
        mean = images[same].mean(0)
        torch.testing.assert_close(x0_hat[row], mean, rtol=0, atol=1e-6)  # statistics are float32
