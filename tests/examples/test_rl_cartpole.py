"""The learner alone, what a run leaves behind, and the whole program once."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.rl_cartpole.__main__ import main, parse
from examples.rl_cartpole.learner import Learner, Trajectory
from examples.rl_cartpole.report import Episode, Report, Training, csv_path, draw_curve

ROOT = Path(__file__).resolve().parents[2]
STATE = np.array([0.01, -0.02, 0.03, 0.04], dtype=np.float32)


def play(learner: Learner, observer: str, rewards: list[float], cut: bool = False) -> None:
    for i, reward in enumerate(rewards):
        learner.select_action(observer, STATE)
        learner.report_reward(observer, reward, cut and i == len(rewards) - 1)


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.policy.parameters()])


def test_a_return_is_the_discounted_sum_of_the_rewards_that_follow() -> None:
    assert Trajectory(rewards=[1.0, 2.0, 4.0]).returns(0.5) == [3.0, 4.0, 4.0]


def test_the_return_of_a_cut_episode_goes_on_as_it_ended() -> None:
    assert Trajectory(rewards=[1.0, 1.0, 1.0], cut=True).returns(0.5) == [2.0, 2.0, 2.0]


def test_each_observer_has_its_own_returns() -> None:
    """One observer's rewards do not count for another's steps, however their messages are mixed."""
    learner = Learner(gamma=0.5)
    for observer, reward in [("observer:0", 1.0), ("observer:1", 8.0), ("observer:0", 1.0), ("observer:1", 8.0)]:
        learner.select_action(observer, STATE)
        learner.report_reward(observer, reward)
    returns = {name: trajectory.returns(0.5) for name, trajectory in learner.trajectories.items()}
    assert returns == {"observer:0": [1.5, 1.0], "observer:1": [12.0, 8.0]}


def test_the_running_reward_follows_the_least_of_the_observers() -> None:
    learner = Learner()
    play(learner, "observer:0", [1.0] * 30)
    play(learner, "observer:1", [1.0] * 10)
    assert learner.finish_episode() == 10.0
    assert learner.running_reward == pytest.approx(0.5)
    play(learner, "observer:0", [1.0] * 20)
    play(learner, "observer:1", [1.0] * 40)
    assert learner.finish_episode() == 20.0
    assert learner.running_reward == pytest.approx(0.05 * 20 + 0.95 * 0.5)


def test_an_episode_changes_the_policy_and_is_then_forgotten() -> None:
    torch.manual_seed(1)
    learner = Learner()
    before = parameters(learner)
    play(learner, "observer:0", [1.0] * 10)
    learner.finish_episode()
    assert not torch.equal(parameters(learner), before)
    assert learner.trajectories == {}


def test_the_gradient_is_that_of_the_policy_that_chose() -> None:
    """The step taken is the one of REINFORCE by hand, over the very log-probabilities of the sampling."""
    torch.manual_seed(1)
    learner = Learner(gamma=0.5)
    play(learner, "observer:0", [1.0, 1.0, 1.0])
    log_probs = learner.trajectories["observer:0"].log_probs
    returns = np.array([1.75, 1.5, 1.0])
    advantages = (returns - returns.mean()) / returns.std()
    loss = -sum(p * float(a) for p, a in zip(log_probs, advantages, strict=True))
    assert isinstance(loss, torch.Tensor)
    expected = torch.autograd.grad(loss, list(learner.policy.parameters()), retain_graph=True)
    learner.finish_episode()
    for parameter, gradient in zip(learner.policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_episodes_that_nothing_ended_but_the_time_limit_teach_nothing() -> None:
    learner = Learner()
    before = parameters(learner)
    play(learner, "observer:0", [1.0] * 50, cut=True)
    assert learner.finish_episode() == 50.0
    assert torch.equal(parameters(learner), before)


def test_an_action_without_its_reward_is_an_error() -> None:
    learner = Learner()
    play(learner, "observer:0", [1.0, 1.0])
    learner.select_action("observer:0", STATE)
    with pytest.raises(RuntimeError, match="observer:0 has 3 actions but 2 rewards"):
        learner.finish_episode()


def test_an_episode_of_nobody_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no observer"):
        Learner().finish_episode()


@pytest.mark.parametrize("gamma", [-0.1, 1.0, 1.5])
def test_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma must be"):
        Learner(gamma=gamma)


def test_a_policy_learns_which_action_pays() -> None:
    """A world of one state and three steps, in which only pushing right is worth anything."""
    torch.manual_seed(1)
    learner = Learner()
    for _ in range(60):
        for observer in ("observer:0", "observer:1"):
            for _ in range(3):
                action = learner.select_action(observer, STATE)
                learner.report_reward(observer, float(action))
        learner.finish_episode()
    learner.policy.eval()
    with torch.no_grad():
        left, right = learner.policy(torch.from_numpy(STATE).unsqueeze(0))[0].tolist()
    assert right > 0.9 > left


def test_solved_means_above_the_threshold() -> None:
    training = Training(threshold=475.0)
    assert not training.solved
    training.episodes.append(Episode(1, 500.0, 475.0, 0.1))
    assert not training.solved
    training.episodes.append(Episode(2, 500.0, 475.1, 0.2))
    assert training.solved


def test_a_report_writes_the_tutorials_lines_and_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "not" / "there"
    training = Training(threshold=475.0)
    with Report(out, log_interval=2, max_episodes=4) as report:
        for number in range(1, 5):
            training.episodes.append(Episode(number, 26.0, 10.014, 0.5))
            report.episode(training.episodes[-1])
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "Episode 2\tLast reward: 26.00\tAverage reward: 10.01",
        "Episode 4\tLast reward: 26.00\tAverage reward: 10.01",
    ]
    assert printed.err == "", "a progress bar is for terminals"
    with csv_path(out).open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["episode", "last_reward", "running_reward", "seconds"]
    assert rows[1] == ["1", "26.0", "10.014", "0.5"]
    assert len(rows) == 5
    assert draw_curve(training, out).read_bytes().startswith(b"\x89PNG")


def test_the_defaults_are_the_tutorials() -> None:
    options = parse([])
    assert (options.world_size, options.log_interval, options.gamma, options.seed) == (2, 10, 0.99, 1)


def test_who_would_see_observers_killed_has_some_that_stay() -> None:
    assert parse(["--elastic"]).world_size == 4
    assert parse(["--elastic", "--world-size", "3"]).world_size == 3
    with pytest.raises(SystemExit):
        parse(["--elastic", "--world-size", "2"])


@pytest.mark.parametrize("arguments", [["--world-size", "1"], ["--gamma", "1"], ["--max-episodes", "0"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_missing_package_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rl_cartpole"])
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == "This example needs tqdm: pip install -e '.[examples]'"


@pytest.mark.timeout(180)
def test_three_episodes_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.rl_cartpole", "--max-episodes", "3", "--log-interval", "1"]
    run = subprocess.run(
        [*command, "--world-size", "2", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "This will run until reward threshold of 475.0 is reached. Ctrl+C to exit."
    assert [line.split("\t")[0] for line in lines[1:4]] == ["Episode 1", "Episode 2", "Episode 3"]
    assert lines[-1].startswith("Not solved in 3 episodes.")
    assert (tmp_path / "learning_curve.png").exists()
    with csv_path(tmp_path).open(newline="") as file:
        episodes = list(csv.DictReader(file))
    assert [row["episode"] for row in episodes] == ["1", "2", "3"]
    assert all(float(row["last_reward"]) >= 1 for row in episodes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_solved_while_observers_are_killed_and_added(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.rl_cartpole", "--elastic", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("Solved!")
    found = re.search(r"^Observers killed: (\d+), added: (\d+)$", run.stdout, re.MULTILINE)
    assert found is not None
    assert min(map(int, found.groups())) >= 1, found[0]
