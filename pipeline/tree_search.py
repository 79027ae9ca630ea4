"""Which tree of proposals? `python -m pipeline.tree_search [tree_search.field=value] [setting=value ...]`.

How often the target's token is the draft's first, second, ... guess is measured on held-out answers, and what forwards of each
width cost on this device. Trees are built from the one and priced by the other; the best ones are then timed in alternation with
the best chains, and the clock decides: a tree that is not faster than the chain is not recommended.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from eval.bench_conditions import BackendFactory, Condition
from eval.bench_measure import measure
from eval.bench_rows import bench_row
from eval.teacher_forcing import Draft
from eval.tree_choice import TreePrediction, is_chain, predict_all, topology_of
from eval.tree_scores import GuessScores, guess_scores
from eval.tree_timing import TreeTimes, measure_tree_times
from eval.tree_verdict import TreeVerdict, judge_trees, way_of
from pipeline.commands import compose_config, read_own_settings, run_command
from pipeline.context import StageContext
from pipeline.drafts import load_drafts
from pipeline.eval_rows import eval_rows
from pipeline.finished import finished_context
from pipeline.models import load_causal_lm, resolve_target
from pipeline.rank import num_ids_of
from pipeline.report import describe_machine
from pipeline.schema import Config
from pipeline.stage_bench import choose_prompts
from pipeline.store import fingerprint_of, write_json
from pipeline.tracking import open_tracker
from pipeline.tree_search_table import Row, markdown_page, topology_text
from specdec_runtime.config import MAX_TREE_NODES
from specdec_runtime.medusa_heads import MedusaHeads

NAME = "tree_search"
DEFAULT_MAX_MINUTES = 5.0


@dataclass
class TreeSearchPlan:
    """Words of the command line that change it: `tree_search.field=value`.

    `max_nodes`, `max_depth`: of a tree. `num_guesses`: most children of a node. `max_tokens`: held-out tokens to count on.
    `num_trees`: predicted best trees that are timed, besides dynamic ones. `max_seconds`: for timing forwards.
    """

    max_nodes: int = 16
    max_depth: int = 5
    num_guesses: int = 6
    max_tokens: int = 4000
    num_trees: int = 2
    max_seconds: float = 45.0

    def __post_init__(self) -> None:
        if not 2 <= self.max_nodes <= MAX_TREE_NODES or self.max_depth < 1 or self.num_guesses < 2:
            raise ValueError(
                f"tree_search.max_nodes={self.max_nodes} must lie in [2, {MAX_TREE_NODES}], tree_search.max_depth="
                f"{self.max_depth} be >= 1, tree_search.num_guesses={self.num_guesses} be >= 2"
            )
        if self.max_tokens < 1 or self.num_trees < 1:
            raise ValueError(
                f"tree_search.max_tokens={self.max_tokens}, tree_search.num_trees={self.num_trees}: must be >= 1"
            )


def main(words: Sequence[str]) -> None:
    """The command.

    Raises:
        ValueError: a setting that there is not, or the draft is not trained yet.
    """
    plan, settings = read_own_settings(TreeSearchPlan, NAME, words)
    search_trees(compose_config(settings), plan)


def search_trees(config: Config, plan: TreeSearchPlan) -> Path:
    """Measure, print, and write `artifacts/tree_search/<fingerprint>/tree_search.json` and `.md`."""
    reference, dtype = resolve_target(config), config.bench.dtype or config.target.dtype
    with open_tracker(config) as tracker:
        context = finished_context(config, reference, ["corpus", "distill"], work_dir=Path(), tracker=tracker)
        fingerprint = fingerprint_of(
            {
                "plan": asdict(plan), "bench": asdict(config.bench), "runtime": asdict(config.runtime),
                "target": reference.revision, "distill": context.inputs["distill"].name,
            }
        )  # fmt: skip
        folder = Path(config.artifacts_dir) / NAME / fingerprint[:12]
        folder.mkdir(parents=True, exist_ok=True)
        with tracker.stage(NAME, fingerprint):
            target = load_causal_lm(reference.path, dtype, config.target.trust_remote_code)
            draft = load_drafts(context, dtype=dtype)["distilled"]
            search = _Search(context, plan, target, draft)
            scores, times = search.scores(), search.times()
            predictions = predict_all(scores, times, max_nodes=plan.max_nodes, max_depth=search.max_depth)
            verdict, rows = search.timed(predictions)
            setting = setting_of(verdict.chosen.condition, is_medusa=search.is_medusa)
            page = markdown_page(scores, times, predictions, rows, verdict, setting=setting)
            write_json(
                folder / "tree_search.json",
                {
                    "setting": setting, "reason": verdict.reason, "tree_over_chain": verdict.tree_over_chain.as_dict(),
                    "acceptance_by_rank": scores.by_rank(), "num_positions": scores.num_positions, "times": asdict(times),
                    "predictions": [{**vars(p), "tree": p.tree.parents} for p in predictions], "measured": rows,
                    "settings": {"machine": describe_machine(dtype), "temperature": scores.temperature,
                                 "sampler": scores.sampler, "plan": asdict(plan)},
                },
            )  # fmt: skip
            (folder / "tree_search.md").write_text(page, encoding="utf-8")
            tracker.log_text(page, "tree_search.md")
            tracker.log_metrics(
                {"tree_over_chain": verdict.tree_over_chain.value, "tree_over_chain_low": verdict.tree_over_chain.low}
                | {f"walltime_speedup_{row['way'].replace(' ', '_')}": row["walltime_speedup"] for row in rows}
            )
            tracker.log_tags({"setting": setting})
            tracker.log_reference(NAME, folder)
    console = Console(highlight=False, markup=False)
    console.print(page, soft_wrap=True)
    console.print(f"written to {folder}\nuse: {setting}", soft_wrap=True)
    return folder


class _Search:
    """The measurements of one search."""

    def __init__(self, context: StageContext, plan: TreeSearchPlan, target: PreTrainedModel, draft: Draft) -> None:
        self.context, self.config, self.plan, self.target, self.draft = context, context.config, plan, target, draft
        heads = draft.model if isinstance(draft.model, MedusaHeads) else None
        self.is_medusa = heads is not None
        self.max_depth = plan.max_depth if heads is None else min(plan.max_depth, heads.shape.num_heads)
        self.temperature, self.batch = min(self.config.bench.temperatures), self.config.bench.batch_sizes[0]

    def scores(self) -> GuessScores:
        """How often each guess stands, on held-out answers."""
        drafts = {} if self.is_medusa else {"distilled": self.draft}
        return guess_scores(
            self.target,
            self.draft,
            eval_rows(self.context, self.target).rows,
            temperature=self.temperature,
            sampler=self.config.runtime.sampler,
            max_depth=self.max_depth,
            num_guesses=self.plan.num_guesses,
            num_token_ids=num_ids_of(self.context.target, self.target, drafts),
            max_tokens=self.plan.max_tokens,
            batch_tokens=self.config.eval.batch_tokens,
            seed=self.config.eval.seed,
        )

    def times(self) -> TreeTimes:
        """What forwards cost, at the preflight's context length."""
        return measure_tree_times(
            self.target,
            self.draft,
            max_nodes=self.plan.max_nodes,
            max_depth=self.max_depth,
            context_tokens=self.config.preflight.context_tokens,
            batch_size=self.batch,
            num_repeats=self.config.preflight.num_repeats,
            max_seconds=self.plan.max_seconds,
            runtime=self.config.runtime,
        )

    def timed(self, predictions: Sequence[TreePrediction]) -> tuple[TreeVerdict, list[Row]]:
        """The best predictions by the clock, in alternation with plain decoding; best first."""
        bench, prompts = self.config.bench, choose_prompts(self.context, self.target).prompts
        factory = BackendFactory(self.target, {"distilled": self.draft}, self.config.runtime)
        minutes = DEFAULT_MAX_MINUTES if bench.max_minutes is None else bench.max_minutes
        measurements = measure(
            factory, self.conditions(predictions), prompts[: bench.num_prompts], bench,
            deadline_s=time.perf_counter() + 60 * minutes,
        )  # fmt: skip
        verdict = judge_trees(measurements, num_bootstrap=bench.num_bootstrap, seed=bench.seed)
        plain = next(m for m in measurements if m.condition.is_plain)
        ordered = sorted(measurements, key=lambda m: -m.tokens_per_second)
        rows = [
            {"way": way_of(m.condition), **bench_row(m, plain, num_bootstrap=bench.num_bootstrap, seed=bench.seed)}
            for m in ordered
        ]
        return verdict, rows

    def conditions(self, predictions: Sequence[TreePrediction]) -> list[Condition]:
        """Plain decoding, the chain with the best prediction and its neighbours, the best trees, and dynamic ones of the first's size, as
        deep and one token deeper."""

        def of(gamma: int, tree: str | tuple[int, ...] | None = None) -> Condition:
            return Condition("native", "distilled", gamma, self.temperature, self.batch, tree=tree)

        best = next(p.tree.depth for p in predictions if is_chain(p.tree))
        chains = [of(gamma) for gamma in (best - 1, best, best + 1) if 1 <= gamma <= self.max_depth]
        trees = [p.tree for p in predictions if not is_chain(p.tree)][: self.plan.num_trees]
        first = trees[0]
        depths = [depth for depth in (first.depth, first.depth + 1) if depth <= min(self.max_depth, first.num_nodes)]
        dynamic = [of(depth, f"dynamic{first.num_nodes}d{depth}") for depth in depths]
        plain = Condition("native", "none", 0, self.temperature, self.batch)
        return [plain, *chains, *(of(tree.depth, topology_of(tree)) for tree in trees), *dynamic]


def setting_of(condition: Condition, *, is_medusa: bool) -> str:
    """The settings that decode like this, as words of a command line."""
    if condition.is_plain:
        return "runtime.num_speculative_tokens=0"
    tree = condition.tree
    name = "null" if tree is None else topology_text(tree)
    words = [f"runtime.tree={name}", f"runtime.num_speculative_tokens={condition.gamma}"]
    return shlex.join([*(["runtime.drafter=medusa"] if is_medusa else []), *words])


if __name__ == "__main__":
    run_command(main)
