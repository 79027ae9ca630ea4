"""What a round with a tree costs on this device: the target's forward by its width, the draft's by depth and width.

Shape legend: B rows, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.teacher_forcing import Draft
from eval.timing import alternated_medians, measure_overhead_ms, width_steps
from specdec_runtime import DecoderConfig
from specdec_runtime.drafter import with_trimmed_head
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.packed import packed
from specdec_runtime.tree import Tree

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)


@dataclass(frozen=True)
class TreeTimes:
    """Medians in milliseconds. target_ms: a forward by tokens per row. draft_first_ms: a draft's first step, which feeds two tokens;
    draft_ms: the later ones by nodes per row. heads_ms: one pass of the first 1, 2, ... heads, empty for a draft model.
    overhead_ms: of a round outside both, by proposed nodes. Widths that were not measured lie on the line between those that were.
    """

    target_ms: Mapping[int, float]
    overhead_ms: Mapping[int, float]
    draft_first_ms: float = 0.0
    draft_ms: Mapping[int, float] | None = None
    heads_ms: tuple[float, ...] = ()

    @property
    def plain_ms(self) -> float:
        """T(1)."""
        return self.target_ms[1]

    def draft_round_ms(self, tree: Tree) -> float:
        """All that proposes a tree: a step per depth, over the nodes that have children; or one pass of the heads."""
        if self.heads_ms:
            return self.heads_ms[tree.depth - 1]
        widths = [sum(bool(tree.children[p]) for p in tree.positions_at(depth)) for depth in range(1, tree.depth)]
        assert self.draft_ms is not None
        return self.draft_first_ms + sum(_between(self.draft_ms, width) for width in widths)

    def verify_ms(self, tree: Tree) -> float:
        """T(N + 1)."""
        return _between(self.target_ms, tree.num_nodes + 1)

    def round_ms(self, tree: Tree) -> float:
        """Draft, target, and the rest."""
        return self.draft_round_ms(tree) + self.verify_ms(tree) + _between(self.overhead_ms, tree.num_nodes)


def _between(known: Mapping[int, float], width: int) -> float:
    """Linear between the two nearest widths; that of the nearest one beyond them."""
    below, above = [w for w in known if w <= width], [w for w in known if w >= width]
    if not below or not above:
        return known[max(below) if below else min(above)]
    low, high = max(below), min(above)
    share = (width - low) / (high - low) if high > low else 0.0
    return known[low] + share * (known[high] - known[low])


def measure_tree_times(
    target: PreTrainedModel,
    draft: Draft,
    *,
    max_nodes: int,
    max_depth: int,
    context_tokens: int = 256,
    batch_size: int = 1,
    num_repeats: int = 15,
    max_seconds: float = 60.0,
    runtime: DecoderConfig | None = None,
) -> TreeTimes:
    """Times as of `TreeTimes`, all in turn as in `eval.timing`.

    Args:
        max_nodes: of a tree. max_depth: of a tree; heads are timed up to this many.
        context_tokens: tokens already cached per row. num_repeats: at most, fewer when `max_seconds` is over.

    Raises:
        ValueError: a model that the runtime cannot use.
    """
    runtime = runtime or DecoderConfig()
    options = StepOptions.of(runtime)
    target_widths = (*(w for w in WIDTHS if w <= max_nodes), max_nodes + 1)
    steps = width_steps(ModelRunner(target, "target", options), target_widths, context_tokens, batch_size)
    draft_widths: tuple[int, ...] = ()
    if isinstance(draft.model, MedusaHeads):
        steps += _head_steps(draft.model, target, max_depth, batch_size, packs=runtime.pack_weights)
    else:
        model = draft.model if draft.vocab_ids is None else with_trimmed_head(draft.model, draft.vocab_ids)
        draft_widths = tuple(w for w in WIDTHS if w < max_nodes) or (1,)
        runner = ModelRunner(model, "draft", options)
        steps += width_steps(runner, (2,), context_tokens, batch_size)
        steps += width_steps(runner, draft_widths, context_tokens, batch_size, all_logits=True)
    medians = alternated_medians(steps, target.device, num_repeats, max_seconds)
    target_ms = dict(zip(target_widths, medians, strict=False))
    overhead_ms = _overheads_ms(target, draft, max_depth, batch_size, runtime)
    rest = medians[len(target_widths) :]
    if not draft_widths:
        return TreeTimes(target_ms, overhead_ms, heads_ms=tuple(rest))
    return TreeTimes(target_ms, overhead_ms, rest[0], dict(zip(draft_widths, rest[1:], strict=True)))


def _head_steps(
    heads: MedusaHeads, target: PreTrainedModel, max_depth: int, batch_size: int, *, packs: bool
) -> list[Callable[[], None]]:
    heads = heads.to(target.device).eval()
    ready = packed(heads, "Medusa heads") if packs else heads
    hidden_BH = torch.randn(batch_size, heads.shape.hidden_size, device=target.device, dtype=heads.dtype)

    def step_of(num_heads: int) -> Callable[[], None]:
        def step() -> None:
            result: Tensor = ready(hidden_BH, num_heads)
            result.argmax(dim=-1)

        return step

    return [step_of(num) for num in range(1, min(max_depth, heads.shape.num_heads) + 1)]


def _overheads_ms(
    target: PreTrainedModel, draft: Draft, max_depth: int, batch_size: int, runtime: DecoderConfig
) -> dict[int, float]:
    """Of a short chain and of a bushy tree, from real decoding."""
    depth = min(2, max_depth)
    topologies = {depth: f"chain{depth}", 12: "4x2" if depth == 2 else "12"}
    roomy = replace(runtime, max_draft_tokens=max(runtime.max_draft_tokens, 12 * batch_size))
    return {
        num_nodes: measure_overhead_ms(
            target, draft.model, gamma=depth, tree=tree, batch_size=batch_size, draft_vocab_ids=draft.vocab_ids, runtime=roomy
        )
        for num_nodes, tree in topologies.items()
    }
