"""Does vLLM keep what was promised of the exported draft? `make check-serving`, or

    python -m pipeline.check_serving [--artifacts FOLDER] [--num-prompts 50] ...

On held-out prompts: the greedy text with the draft against the greedy text without it, first differences listed with the
gap between the two best logits there; and the engine's own acceptance at each temperature against the one that
teacher forcing predicts for the text it wrote. Written to `<artifacts>/serving/check_serving.json`. Exit code 3: a difference
that is no near tie, or an acceptance that is off by more than --max-difference.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from eval.bootstrap import bootstrap_difference
from eval.lossless import find_mismatches
from eval.rounds import rounds_of
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft
from pipeline.commands import run_command
from pipeline.errors import EXIT_GATE
from pipeline.models import load_causal_lm
from pipeline.report import describe_machine
from pipeline.serving_inputs import ServedPair, add_pair_arguments, held_out_prompts, read_pair
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
    pair = read_pair(arguments.artifacts, target=arguments.target)
    pair = pair.with_settings(gamma=arguments.gamma, sampler=arguments.sampler)
    max_tokens = arguments.max_length - arguments.max_new_tokens
    prompts = held_out_prompts(arguments.artifacts, arguments.num_prompts, max_tokens=max_tokens)
    [plain] = decode(pair, prompts, [0.0], arguments, has_draft=False)
    drafted = decode(pair, prompts, [0.0, 1.0], arguments, has_draft=True)
    target = load_causal_lm(pair.target, pair.dtype)
    draft = load_causal_lm(str(pair.draft), pair.dtype, field="draft")
    mismatches = find_mismatches(
        target, prompts, token_ids(plain["outputs"]), token_ids(drafted[0]["outputs"])
    )
    comparisons = [
        compare_acceptance(target, draft, pair, prompts, run["outputs"], temperature=run["temperature"])
        for run in drafted
    ]
    return {
        "machine": describe_machine(pair.dtype),
        "target": pair.target,
        "speculative_config": pair.speculative_config(),
        "num_prompts": len(prompts),
        "num_identical": len(prompts) - len(mismatches),
        "mismatches": [mismatch.as_dict() for mismatch in mismatches],
        "acceptance": comparisons,
        "tokens_per_second": {
            "plain": plain["tokens_per_second"],
            "draft": drafted[0]["tokens_per_second"],
            "batch": arguments.batch,
        },
        "is_text_kept": all(mismatch.is_near_tie for mismatch in mismatches),
        "is_acceptance_as_predicted": all(
            abs(comparison["difference"]) <= arguments.max_difference for comparison in comparisons
        ),
    }


def decode(
    pair: ServedPair,
    prompts: Prompts,
    temperatures: Sequence[float],
    arguments: argparse.Namespace,
    *,
    has_draft: bool,
) -> list[dict[str, Any]]:
    """One engine's outputs at each temperature, all prompts in one call."""
    engine = VLLMBackend(
        pair.target,
        pair.draft if has_draft else None,
        num_speculative_tokens=pair.num_speculative_tokens,
        sampler=pair.sampler,
        dtype=pair.dtype,
        max_length=arguments.max_length,
        max_batch_size=arguments.batch,
        enforce_eager=arguments.eager,
    )
    results = []
    with engine:
        engine.generate([Request(list(prompts[0]), max_new_tokens=8)])  # the first call chooses kernels
        for temperature in temperatures:
            requests = [
                Request(
                    list(prompt), max_new_tokens=arguments.max_new_tokens, temperature=temperature, seed=index
                )
                for index, prompt in enumerate(prompts)
            ]
            start = time.perf_counter()
            outputs = engine.generate(requests)
            num_tokens = sum(len(output.token_ids) for output in outputs)
            speed = num_tokens / (time.perf_counter() - start)
            results.append({"temperature": temperature, "outputs": outputs, "tokens_per_second": speed})
    return results


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


def token_ids(outputs: Sequence[Output]) -> list[list[int]]:
    """Of each output."""
    return [output.token_ids for output in outputs]


def summary(found: dict[str, Any]) -> str:
    """A few lines for people."""
    speed = found["tokens_per_second"]
    lines = [
        f"greedy text: {found['num_identical']} of {found['num_prompts']} outputs are those of plain vLLM",
        *(
            f"  prompt {m['prompt']}: differs from token {m['position']} on, gap of the two best logits {m['top2_gap']:.3f}"
            f" ({'near tie' if m['is_near_tie'] else 'NOT a near tie'})"
            for m in found["mismatches"]
        ),
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
