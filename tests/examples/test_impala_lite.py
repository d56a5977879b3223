"""V-trace against the paper's sum, playing, the actor's stream, and the whole program with an actor killed."""

from __future__ import annotations

import csv
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc as rpc
from examples.impala_lite.__main__ import main, parse
from examples.impala_lite.actors import Evaluator, RolloutActor
from examples.impala_lite.learner import names_of_lost
from examples.impala_lite.network import ActorCritic, weights_of
from examples.impala_lite.playing import Rollout, Table, evaluate
from examples.impala_lite.report import Report, Run, csv_path, draw_curve
from examples.impala_lite.training import Step, Trainer
from examples.impala_lite.vtrace import v_trace
from tests.worlds import inside, until

ROOT = Path(__file__).resolve().parents[2]


def targets_of(rewards: list[float], cut: bool = False, end: bool = False, ratio: float = 1.0) -> Any:
    """V-trace of one environment in which every value is 10."""
    count, last = len(rewards), torch.zeros(len(rewards), 1, dtype=torch.bool)
    last[-1] = True
    tens = torch.full((count, 1), 10.0)
    return v_trace(
        torch.full((count, 1), ratio).log(),
        torch.tensor(rewards).unsqueeze(1),
        last & end, last & cut, tens, tens, gamma=0.5,
    )  # fmt: skip


def test_on_policy_the_targets_are_the_discounted_returns() -> None:
    assert targets_of([1.0, 2.0, 4.0], end=True).values.squeeze(1).tolist() == [3.0, 4.0, 4.0]
    assert targets_of([1.0, 2.0, 4.0]).values.squeeze(1).tolist() == [4.25, 6.5, 9.0]


def test_after_a_cut_the_value_of_the_next_state_counts_and_after_an_end_nothing() -> None:
    assert targets_of([4.0], cut=True).values.item() == 9.0
    assert targets_of([4.0], end=True).values.item() == 4.0


def test_what_the_present_policy_would_hardly_do_counts_little_and_nothing_counts_more_than_once() -> None:
    assert targets_of([4.0], end=True, ratio=0.5).values.item() == 10.0 + 0.5 * (4.0 - 10.0)
    assert targets_of([4.0], end=True, ratio=0.5).advantages.item() == 0.5 * (4.0 - 10.0)
    assert targets_of([4.0], end=True, ratio=8.0).values.item() == 4.0
    assert targets_of([4.0], end=True, ratio=8.0).weights.item() == 1.0


def test_v_trace_is_the_sum_of_the_paper() -> None:
    """Equation 1, written out, on an environment whose episode ends in the midst, by a fall and by the time limit."""
    torch.manual_seed(3)
    steps, gamma = 9, 0.9
    log_ratios, rewards, values, next_values = torch.randn(4, steps, 2, dtype=torch.float64)
    ends, cuts = torch.zeros(2, steps, 2, dtype=torch.bool)
    ends[4, 0], cuts[4, 1] = True, True
    found = v_trace(log_ratios, rewards, ends, cuts, values, next_values, gamma)
    for environment in range(2):
        for start in range(steps):
            target, product = float(values[start, environment]), 1.0
            for step in range(start, steps):
                ratio = min(1.0, float(log_ratios[step, environment].exp()))
                after = 0.0 if ends[step, environment] else gamma * float(next_values[step, environment])
                surprise = ratio * (float(rewards[step, environment]) + after - float(values[step, environment]))
                target += product * surprise
                if ends[step, environment] or cuts[step, environment]:
                    break
                product *= gamma * ratio
            assert float(found.values[start, environment]) == pytest.approx(target)


def test_a_rollout_tells_of_states_actions_and_episodes() -> None:
    torch.manual_seed(1)
    table = Table(3, seed=5)
    rollout = table.play(ActorCritic(), 7, 60)
    table.close()
    assert rollout.version == 7
    assert rollout.states.shape == rollout.next_states.shape == (60, 3, 4)
    assert rollout.rewards.shape == rollout.actions.shape == rollout.log_probs.shape == (60, 3)
    assert len(rollout.returns) == int(rollout.ends.sum()) > 0  # nobody balances for 500 steps by chance
    assert not rollout.cuts.any()
    goes_on = ~rollout.ends[:-1]
    assert torch.equal(rollout.states[1:][goes_on], rollout.next_states[:-1][goes_on])
    assert (rollout.states[1:][~goes_on].abs() <= 0.05).all(), "an episode begins near the middle"
    assert (rollout.next_states[rollout.ends].abs().max(1).values > 0.2).all(), "and ends far from it"


def test_the_time_limit_cuts_and_does_not_end() -> None:
    network = balancing()
    table = Table(1, seed=1)
    rollout = table.play(network, 0, 500)
    table.close()
    assert rollout.returns == [500.0]
    assert rollout.cuts[-1].item()
    assert not rollout.ends.any()
    assert evaluate(network, 3, seed=1) == [500.0] * 3


def balancing() -> ActorCritic:
    """A policy by hand: it pushes to where the pole falls."""
    network = ActorCritic()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        parameters = dict(network.named_parameters())
        parameters["body.0.weight"][0] = 0.1 * torch.tensor([0.1, 0.5, 3.0, 1.0])
        parameters["body.2.weight"][0, 0] = 1.0
        parameters["policy.weight"][:, 0] = torch.tensor([-1e4, 1e4])
    return network


def test_a_step_changes_the_weights_and_says_how_old_the_rollouts_were() -> None:
    torch.manual_seed(1)
    trainer, table = Trainer(), Table(4, seed=1)
    rollouts = [table.play(trainer.network, 0, 16) for _ in range(2)]
    before = weights_of(trainer.network)
    first = trainer.step(rollouts)
    second = trainer.step(rollouts)
    table.close()
    assert first.weight == pytest.approx(1.0)
    assert first.lag == 0.0
    assert second.weight < 1.0, "the policy has changed since"
    assert second.lag == 1.0
    assert trainer.version == 2
    assert not torch.equal(before["policy.weight"], trainer.network.policy.weight)


def test_gamma_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma must be at least 0 and less than 1, not 1"):
        Trainer(gamma=1.0)


class Counting(RolloutActor, concurrency=2):
    """Counts the rollouts that it makes."""

    made = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed, environments=2, steps=4)
        self.table.play = functools.partial(self.played, self.table.play)  # type: ignore[method-assign]

    def played(self, play: Callable[..., Rollout], *arguments: Any) -> Rollout:
        self.made += 1
        return play(*arguments)

    def count(self) -> int:
        return self.made


@inside
def test_an_actor_waits_for_weights_and_then_is_as_far_ahead_as_the_window_says() -> None:
    actor = Counting.spawn(1, 1)
    rollouts = rpc.Group([actor]).stream(window=1).rollouts()
    assert actor.rpc_sync().count() == 0
    with pytest.raises(rpc.RPCTimeoutError):
        next(rpc.Group([actor]).stream(timeout=0.1, window=0).rollouts())
    actor.rpc_async().set_weights(3, weights_of(ActorCritic())).wait()
    assert next(rollouts)[1].version == 3
    until(lambda: actor.rpc_sync().count() == 3)  # the one taken, the next one asked for, and the window
    for _ in range(20):
        assert actor.rpc_sync().count() == 3, "nobody has taken another one"
    actor.rpc_async().set_weights(4, weights_of(ActorCritic())).wait()
    assert [next(rollouts)[1].version for _ in range(4)] == [3, 3, 4, 4]
    rollouts.close()


@inside
def test_an_evaluator_judges_the_weights_that_it_is_given() -> None:
    evaluator = Evaluator.spawn(1)
    assert evaluator.rpc_sync().evaluate(weights_of(balancing()), 4, seed=9) == 500.0
    assert evaluator.rpc_sync().evaluate(weights_of(ActorCritic()), 4, seed=9) < 475.0


def test_only_a_lost_actor_is_forgiven() -> None:
    lost = rpc.WorkerLostError("it is gone", worker="actor:1", rank=2, host="here", pid=3, reason="", may_have_run=True)
    assert names_of_lost(rpc.GroupError.of([("actor:1", lost)], 3)) == ("actor:1",)
    with pytest.raises(rpc.GroupError, match="actor:2"):
        names_of_lost(rpc.GroupError.of([("actor:1", lost), ("actor:2", ValueError("a mistake"))], 3))


def test_a_report_tells_of_actors_and_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = Run(475.0), tmp_path / "not" / "there"
    table = Table(2, seed=5)
    rollout = table.play(ActorCritic(), 0, 50)
    table.close()
    with Report(out, run, 4) as report:
        report.rollout("actor:0", 0, rollout)
        report.step(1, Step(0.5, 0.25, 2.0))
        report.evaluation(1, 474.9)
        report.lost("actor:0", 1)
        report.lost("actor:0", 1)
        assert report.gone == {"actor:0"}
        before = run.solved
        report.rollout("actor:0", 1, rollout)
        report.evaluation(2, 475.0)
    assert (before, run.solved) == (False, True)
    assert (run.frames, run.lost, run.back) == (200, [100], [100])
    assert len(run.episodes) == 2 * len(rollout.returns)
    printed = capsys.readouterr()
    assert [line.split("\t")[:2] for line in printed.out.splitlines()] == [
        ["Step 1", "Evaluator: 474.9"],
        ["Step 1", "actor:0 is lost; the others go on"],
        ["Step 1", "actor:0 is back"],
        ["Step 2", "Evaluator: 475.0"],
    ]
    assert printed.err == "", "a progress bar is for terminals"
    with csv_path(out).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["version"], row["frames"], row["average"], row["lag"]) for row in rows] == [
        ("1", "100", "474.9", "2.0"),
        ("2", "200", "475.0", "2.0"),
    ]
    assert draw_curve(run, out).read_bytes().startswith(b"\x89PNG")
    assert draw_curve(Run(475.0), tmp_path).exists(), "a run that was too short for an evaluation"


@pytest.mark.parametrize("arguments", [["--actors", "0"], ["--batch", "0"], ["--kill-one", "-1"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_missing_package_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["impala_lite"])
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == "This example needs gymnasium: pip install -e '.[examples]'"


def run_program(out: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "examples.impala_lite", "--out", str(out), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (out / "learning_curve.png").exists()
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_given_up_says_so(tmp_path: Path) -> None:
    assert run_program(tmp_path, "--max-steps", "3").splitlines()[-1].startswith("Not solved in 3 steps.")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_it_is_solved_while_an_actor_is_killed_and_comes_back(seed: str, tmp_path: Path) -> None:
    printed = run_program(tmp_path, "--kill-one", "5", "--seed", seed)
    last = printed.splitlines()[-1]
    assert last.startswith("Solved!"), printed
    average = re.search(r"average of 20 episodes is ([\d.]+) ", last)
    assert average is not None
    assert float(average[1]) >= 475
    assert "Actors lost: 1, back: 1\n" in printed
    with csv_path(tmp_path).open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["average"]) == float(average[1])
