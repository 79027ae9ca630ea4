"""Tree, chain or plain decoding: what the clock says, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.bench_conditions import Condition, tree_name
from eval.bench_measure import Measurement
from eval.bootstrap import Interval, bootstrap_speedup
from eval.draft_verdict import shows_gain


@dataclass(frozen=True)
class TreeVerdict:
    """`chosen`: the way to decode. `tree_over_chain`: paired ratio of the speeds of the best tree and the best chain, with its 95%
    interval over prompts. `reason`: in words."""

    chosen: Measurement
    tree_over_chain: Interval
    reason: str


def judge_trees(measurements: Sequence[Measurement], *, num_bootstrap: int, seed: int) -> TreeVerdict:
    """The best tree where the whole interval of its speed over the best chain's is above 1, else that chain; plain decoding where it is
    faster than that.

    Args:
        measurements: of one run in alternation: plain decoding, one or more chains, one or more trees.
    """
    plain = next(m for m in measurements if m.condition.is_plain)
    drafted = [m for m in measurements if not m.condition.is_plain]
    chain = max((m for m in drafted if m.condition.tree is None), key=_speed)
    tree = max((m for m in drafted if m.condition.tree is not None), key=_speed)
    ratio = bootstrap_speedup(
        tree.num_tokens, tree.seconds, chain.num_tokens, chain.seconds, num_bootstrap=num_bootstrap, seed=seed
    )
    chosen = tree if shows_gain(ratio.low, ratio.high) else chain
    reason = _comparison(tree, chain, ratio)
    if _speed(plain) > _speed(chosen):
        reason += f" Plain decoding is faster than both: {_speed(plain):.1f} tokens/s against {_speed(chosen):.1f}."
        chosen = plain
    return TreeVerdict(chosen, ratio, reason)


def way_of(condition: Condition) -> str:
    """`plain`, `chain 2`, `tree 3x2x1`."""
    if condition.is_plain:
        return "plain"
    return f"chain {condition.gamma}" if condition.tree is None else f"tree {tree_name(condition.tree)}"


def parts_ms(measurement: Measurement) -> dict[str, float]:
    """Milliseconds per round of one row: draft, verify, overhead, and their sum."""
    stats = measurement.stats
    rounds = max(stats.num_rounds, 1)
    parts = {"draft": stats.draft_ms / rounds, "verify": stats.verify_ms / rounds, "overhead": stats.overhead_ms / rounds}
    return {**parts, "round": sum(parts.values())}


def _comparison(tree: Measurement, chain: Measurement, ratio: Interval) -> str:
    of_tree, of_chain = parts_ms(tree), parts_ms(chain)
    tau_tree, tau_chain = tree.stats.block_efficiency, chain.stats.block_efficiency
    verdict = "faster" if shows_gain(ratio.low, ratio.high) else "slower" if ratio.high < 1 else "not faster beyond chance"
    parts = ", ".join(f"{name} {of_tree[name]:.1f} against {of_chain[name]:.1f}" for name in ("draft", "verify", "overhead"))
    return (
        f"{way_of(tree.condition)} is {verdict} than {way_of(chain.condition)}: {ratio.value:.3f} [{ratio.low:.3f}, "
        f"{ratio.high:.3f}] times its tokens/s. It commits {tau_tree:.2f} tokens per target forward against {tau_chain:.2f} "
        f"({tau_tree / tau_chain - 1:+.0%}), and a round takes {of_tree['round']:.1f} ms against {of_chain['round']:.1f} "
        f"({of_tree['round'] / of_chain['round'] - 1:+.0%}; {parts}; verification of {tree.condition.width} tokens in place of "
        f"{chain.condition.width})."
    )


def _speed(measurement: Measurement) -> float:
    return measurement.tokens_per_second
