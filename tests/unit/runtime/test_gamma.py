"""gamma=auto finds the fastest number of proposals in simulated rounds, goes down to 0, and comes back."""

import random

import pytest
import torch

from specdec_runtime import DecoderConfig
from specdec_runtime.gamma import AutoGamma, Choice, FixedGamma, RoundReport, make_gamma_policy
from specdec_runtime.gamma_models import ProposalModel

T_DRAFT, T_TARGET, T_PER_TOKEN, OVERHEAD = 6.0, 37.0, 1.0, 1.0


class Machine:
    """A batch of rows whose proposals are accepted with a given conditional probability, and what a round costs."""

    def __init__(self, policy: AutoGamma, *, num_rows: int = 1, draft_ms: float = T_DRAFT) -> None:
        self.policy, self.num_rows, self.draft_ms = policy, num_rows, draft_ms
        self.random = random.Random(0)

    def round_ms(self, gamma: int) -> float:
        return gamma * self.draft_ms + T_TARGET + T_PER_TOKEN * gamma + OVERHEAD

    def run(self, num_rounds: int, acceptance: float) -> tuple[list[int], float]:
        """Chosen gammas, and tokens per ms and row."""
        chosen, tokens, ms = [], 0, 0.0
        for _ in range(num_rounds):
            gamma = self.policy.choose(self.num_rows).gamma
            accepted = [self._accepted(gamma, acceptance) for _ in range(self.num_rows)]
            noise = self.random.uniform(0.95, 1.05)
            self.policy.observe(
                RoundReport(
                    rows=[None] * self.num_rows,
                    num_wanted=[gamma] * self.num_rows,
                    num_proposed=[gamma] * self.num_rows,
                    num_accepted=accepted,
                    num_drafted=gamma,
                    width=gamma + 1,
                    draft_ms=gamma * self.draft_ms * noise,
                    verify_ms=(T_TARGET + T_PER_TOKEN * gamma) * noise,
                    overhead_ms=OVERHEAD,
                )
            )
            chosen.append(gamma)
            tokens += sum(accepted) / self.num_rows + 1
            ms += self.round_ms(gamma)
        return chosen, tokens / ms

    def _accepted(self, gamma: int, acceptance: float) -> int:
        num = 0
        while num < gamma and self.random.random() < acceptance:
            num += 1
        return num

    def best_speed(self, acceptance: float, max_gamma: int) -> float:
        return max(
            sum(acceptance**i for i in range(gamma + 1)) / self.round_ms(gamma)
            for gamma in range(max_gamma + 1)
        )


def auto(max_gamma: int = 8) -> AutoGamma:
    config = DecoderConfig(num_speculative_tokens=max_gamma, gamma="auto")
    policy = make_gamma_policy(config, torch.device("cpu"))
    assert isinstance(policy, AutoGamma)
    return policy


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_within_five_percent_of_the_best_fixed_number(acceptance):
    machine = Machine(auto())
    machine.run(100, acceptance)
    _, speed = machine.run(600, acceptance)
    assert speed > 0.93 * machine.best_speed(acceptance, 8)  # 5%, and what 600 random rounds vary by


def test_a_useless_draft_costs_less_than_three_percent():
    machine = Machine(auto())
    chosen, speed = machine.run(1500, 0.01)
    assert speed > 0.97 / machine.round_ms(0)
    assert chosen[-1] == 0


def test_it_comes_back_when_speculation_pays_again():
    machine = Machine(auto())
    machine.run(300, 0.01)
    chosen, _ = machine.run(600, 0.9)
    assert chosen[-1] >= 3


def test_a_slow_draft_is_used_less():
    slow, quick = Machine(auto(), draft_ms=18.0), Machine(auto(), draft_ms=2.0)
    assert slow.run(300, 0.7)[0][-1] < quick.run(300, 0.7)[0][-1]


def report(*, wanted: int, drafted: int, accepted: int, draft_ms: float = 0.0) -> RoundReport:
    return RoundReport(
        rows=[None],
        num_wanted=[wanted],
        num_proposed=[drafted],
        num_accepted=[accepted],
        num_drafted=drafted,
        width=drafted + 1,
        draft_ms=draft_ms,
        verify_ms=T_TARGET,
        overhead_ms=0.0,
    )


def test_expected_tokens_use_measured_positions():
    """vllm 56101: conditional rates by position; E = 1 + a1 + a1 a2, here with a1 = 1 and a2 = 0."""
    model = ProposalModel(3)
    for _ in range(3000):
        model.add(report(wanted=2, drafted=2, accepted=1))
    assert model.expected_tokens(0) == 1.0
    assert model.expected_tokens(1) == pytest.approx(2.0, abs=0.02)
    assert model.expected_tokens(2) == pytest.approx(2.0, abs=0.06)


def test_positions_that_an_unsure_draft_did_not_reach_count_as_not_accepted():
    """Every other round stops behind one accepted proposal, the others have two accepted: E(2) = 1 + 1 + 1/2, in 1.5 steps.
    Acceptance among the judged alone would promise 3 tokens."""
    model = ProposalModel(2)
    for _ in range(1000):
        model.add(report(wanted=2, drafted=1, accepted=1))
        model.add(report(wanted=2, drafted=2, accepted=2))
    assert model.expected_tokens(2) == pytest.approx(2.5, abs=0.05)
    assert model.expected_steps(2) == pytest.approx(1.5, abs=0.05)


def test_a_row_that_is_alone_stops_where_another_step_does_not_pay():
    """A step of 4 ms must bring as many tokens as 4 ms bring anyway: 4 * 1.5 / (37 + 4) = .146 of them, which at an
    acceptance of .5 asks for a chance of .29 so far. Several rows go on together."""
    policy = auto(max_gamma=1)
    for _ in range(AutoGamma.NUM_PLAIN_FIRST):
        policy.observe(report(wanted=0, drafted=0, accepted=0))
    for i in range(600):
        policy.choose(1)
        policy.observe(report(wanted=1, drafted=1, accepted=i % 2, draft_ms=4.0))
    assert policy.choose(1) == Choice(1, pytest.approx(4 * 1.5 / 41 / 0.5, rel=0.05))
    for _ in range(AutoGamma.NUM_PLAIN_FIRST):
        policy.observe(RoundReport([None] * 2, [0, 0], [0, 0], [0, 0], 0, 1, 0.0, T_TARGET, 0.0))
    assert policy.choose(2) == Choice(1, 0.0)


def test_fixed_is_fixed():
    config = DecoderConfig(num_speculative_tokens=3, draft_confidence=0.2)
    policy = make_gamma_policy(config, torch.device("cpu"))
    assert isinstance(policy, FixedGamma)
    assert policy.choose(2) == Choice(3, 0.2)
