"""Does vLLM keep what was promised of the exported draft? `make check-serving`, or

    python -m pipeline.check_serving [--artifacts FOLDER] [--num-prompts 50] ...

On held-out prompts: the greedy text with the draft against the greedy text without it, first differences listed with the
gap between the two best logits there, beside how far that gap moves in plain vLLM when only the batch is larger
(`serving_ties`); and the engine's own acceptance at each temperature against the one that teacher forcing predicts for the
text it wrote. Written to `<artifacts>/serving/check_serving.json`. Exit code 3: a difference that is no near tie, or an
acceptance that is off by more than --max-difference.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from eval.bootstrap import bootstrap_difference
from eval.rounds import rounds_of
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft
from pipeline.commands import run_command
from pipeline.errors import EXIT_GATE
from pipeline.models import load_causal_lm
from pipeline.report import describe_machine
from pipeline.serving_inputs import ServedPair, add_pair_arguments, held_out_prompts, read_pair
from pipeline.serving_ties import NUM_TOP, find_differences, gap_noise
from pipeline.store import write_json
from specdec_runtime.backends.vllm import VLLMBackend
from specdec_runtime.request import Output, Request

Prompts = Sequence[Sequence[int]]


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.check_serving", description="Does vLLM keep what was promised of the draft?"
    )
    add_pair_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer together, in tokens")
    parser.add_argument("--batch", type=int, default=8, help="requests that run at once")
    parser.add_argument(
        "--max-difference", type=float, default=0.02, help="between measured and predicted acceptance"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile: starts sooner, decodes slower")
    return parser.parse_args(words)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole check; what it found, as in the JSON file."""
    pair = read_pair(arguments.artifacts, target=arguments.target).with_settings(
        gamma=arguments.gamma, sampler=arguments.sampler, dtype=arguments.dtype
    )
    max_tokens = arguments.max_length - arguments.max_new_tokens
    prompts = held_out_prompts(arguments.artifacts, arguments.num_prompts, max_tokens=max_tokens)
    num_wide = arguments.batch * (pair.num_speculative_tokens + 1)
    with engine_of(pair, arguments, has_draft=False, batch=arguments.batch) as engine:
        plain = decode(engine, prompts, arguments)
        scored = decode(engine, prompts, arguments, logprobs=NUM_TOP)  # apart: it takes time
    with engine_of(pair, arguments, has_draft=False, batch=num_wide) as engine:
        wide = decode(engine, prompts, arguments, logprobs=NUM_TOP)
    with engine_of(pair, arguments, has_draft=True, batch=arguments.batch) as engine:
        drafted = [decode(engine, prompts, arguments, temperature=temperature) for temperature in (0.0, 1.0)]
    noise = gap_noise(scored["outputs"], wide["outputs"], rows=(arguments.batch, num_wide))
    greedy = [output.token_ids for output in drafted[0]["outputs"]]
    differences = find_differences(scored["outputs"], greedy, max_gap=noise.largest)
    target = load_causal_lm(pair.target, pair.dtype)
    draft = load_causal_lm(str(pair.draft), pair.dtype, field="draft")
    comparisons = [
        compare_acceptance(target, draft, pair, prompts, run["outputs"], temperature=run["temperature"])
        for run in drafted
    ]
    return {
        "machine": describe_machine(pair.dtype),
        "target": pair.target,
        "speculative_config": pair.speculative_config(),
        "num_prompts": len(prompts),
        "num_identical": len(prompts) - len(differences),
        "mismatches": [difference.as_dict() for difference in differences],
        "plain_against_itself": noise.as_dict(),
        "acceptance": comparisons,
        "tokens_per_second": {
            "plain": plain["tokens_per_second"],
            "draft": drafted[0]["tokens_per_second"],
            "batch": arguments.batch,
        },
        "is_text_kept": all(difference.is_near_tie for difference in differences),
        "is_acceptance_as_predicted": all(
            abs(comparison["difference"]) <= arguments.max_difference for comparison in comparisons
        ),
    }


def engine_of(pair: ServedPair, arguments: argparse.Namespace, *, has_draft: bool, batch: int) -> VLLMBackend:
    """vLLM on the pair or on its target alone, at most `batch` requests at once."""
    return VLLMBackend(
        pair.target,
        pair.draft if has_draft else None,
        num_speculative_tokens=pair.num_speculative_tokens,
        sampler=pair.sampler,
        dtype=pair.dtype,
        max_length=arguments.max_length,
        max_batch_size=batch,
        enforce_eager=arguments.eager,
    )


def decode(
    engine: VLLMBackend,
    prompts: Prompts,
    arguments: argparse.Namespace,
    *,
    temperature: float = 0.0,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """Outputs and speed, all prompts in one call."""
    engine.generate([Request(list(prompts[0]), max_new_tokens=8)])  # an engine's first call chooses kernels
    requests = [
        Request(
            list(prompt),
            max_new_tokens=arguments.max_new_tokens,
            temperature=temperature,
            seed=index,
            logprobs=logprobs,
        )
        for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    outputs = engine.generate(requests)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    speed = num_tokens / (time.perf_counter() - start)
    return {"temperature": temperature, "outputs": outputs, "tokens_per_second": speed}


def compare_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    pair: ServedPair,
    prompts: Prompts,
    outputs: Sequence[Output],
    *,
    temperature: float,
) -> dict[str, Any]:
    """The engine's accepted tokens per proposed one against those that its own text lets expect, with a 95% interval.

    `acceptance_rate` is the mean over all positions; a round's later proposals see positions that are not like the mean.
    """
    gamma = pair.num_speculative_tokens
    rows = [
        {
            "prompt_id": str(index),
            "source": "",
            "prompt_token_ids": prompt,
            "response_token_ids": output.token_ids,
            "temperature": temperature,
        }
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    [table] = teacher_forced_acceptance(
        target, {"draft": Draft(draft)}, rows, temperatures=[temperature], samplers=[pair.sampler]
    )
    # vLLM proposes for an output's last token too, where its length is cut.
    expected = rounds_of(table.given_token, gamma, was_cut=[False] * len(outputs))
    measured = [output.stats for output in outputs]
    counts = (
        np.array([float(stats.num_accepted) for stats in measured]),
        np.array([float(gamma * stats.num_rounds) for stats in measured]),
        expected.accepted.sum(axis=1),
        gamma * expected.num_rounds,
    )
    interval = bootstrap_difference(*counts, num_bootstrap=1000, seed=0)
    return {
        "temperature": temperature,
        "sampler": pair.sampler,
        "gamma": gamma,
        "engine": float(counts[0].sum() / counts[1].sum()),
        "predicted": float(counts[2].sum() / counts[3].sum()),
        "acceptance_rate": table.rate().value,
        "difference": interval.value,
        "low": interval.low,
        "high": interval.high,
    }


def summary(found: dict[str, Any]) -> str:
    """A few lines for people."""
    speed, noise = found["tokens_per_second"], found["plain_against_itself"]
    lines = [
        f"greedy text: {found['num_identical']} of {found['num_prompts']} outputs are those of plain vLLM",
        *(
            f"  prompt {m['prompt']}: differs from token {m['position']} on, gap of the two best logits {m['top2_gap']:.3f}"
            f" ({'near tie' if m['is_near_tie'] else 'NOT a near tie'})"
            for m in found["mismatches"]
        ),
        f"plain vLLM against itself, {noise['rows'][0]} and {noise['rows'][1]} rows per step: {noise['num_identical']} of "
        f"{noise['num_prompts']} texts are the same; it turned gaps up to {noise['largest_turned_gap']:.3f}, and the gap moved by "
        f"up to {noise['largest']:.3f} (median {noise['median']:.3f}, 99% {noise['p99']:.3f}), which bounds a near tie",
        *(
            f"acceptance at temperature {a['temperature']:g} ({a['sampler']}, gamma {a['gamma']}): engine {a['engine']:.3f}, "
            f"predicted {a['predicted']:.3f}, difference {a['difference']:+.3f} [{a['low']:+.3f}, {a['high']:+.3f}]"
            for a in found["acceptance"]
        ),
        f"speed at batch {speed['batch']}, greedy: {speed['plain']:.1f} tokens/s plain, {speed['draft']:.1f} with the draft",
    ]
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """The command.

    Raises:
        ValueError: vLLM or the export is missing, a wrong setting.
    """
    arguments = parse_arguments(words)
    found = run(arguments)
    folder = arguments.artifacts / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "check_serving.json", found)
    print(summary(found))
    if not found["is_text_kept"] or not found["is_acceptance_as_predicted"]:
        print("the draft does not keep in vLLM what was promised", file=sys.stderr)
        sys.exit(EXIT_GATE)


if __name__ == "__main__":
    run_command(main)
