"""Does this draft fit this target, and does it pay here? `python -m pipeline.doctor TARGET DRAFT`.

First the checklist, from the files alone; then, when nothing forbids it, a short probe by the clock. Exit codes:
0 yes; 2 the pair is bad (each reason is named), or the command was used wrongly; 3 the pair fits, but no gain is shown.
1 stays what it is everywhere: a crash. Warnings change no exit code.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from pipeline.compat import ERROR, WARNING, Finding, context_length, errors
from pipeline.doctor_checklist import Line, checklist, checklist_table
from pipeline.doctor_probe import Probe, ProbeSettings, run_probe, time_steps
from pipeline.doctor_prompts import (
    MAX_QUESTION_TOKENS,
    fixed_prompts,
    given_prompts,
    self_asked_prompts,
)
from pipeline.doctor_verdict import Answer, answer_of, probe_table
from pipeline.errors import EXIT_USER_MISTAKE, message_of
from pipeline.models import DTYPES, MissingPackageError, load_causal_lm, load_tokenizer, obtain_model
from pipeline.pair import inspect_pair
from pipeline.weight_files import check_loaded
from specdec_runtime.loading import read_vocab_shortlist

#: Questions are invented only where that takes no more than this share of the time; they go three batches deep.
ASKING_SHARE, ASKING_BATCHES = 0.25, 3


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Print the checklist, the probe and the answer; leave with the exit code."""
    options = _parser().parse_args(arguments)
    try:
        sys.exit(run_doctor(options))
    except Exception as error:
        if (message := message_of(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(EXIT_USER_MISTAKE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="folder or Hugging Face id")
    parser.add_argument("draft", nargs="?", help="folder or Hugging Face id")
    parser.add_argument(
        "--prompts", metavar="FILE", help="jsonl, csv, parquet or text; else the target invents questions"
    )
    parser.add_argument(
        "--plain-text", action="store_true", help="base models: no chat template is asked for"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="for the probe, loading apart (default: 30)"
    )
    parser.add_argument("--max-gamma", type=int, default=4, help="gammas 1 to this are judged (default: 4)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="(default: 0 1)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the target's own")
    parser.add_argument("--no-probe", action="store_true", help="the checklist only")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found there, too")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the models"
    )
    return parser


def run_doctor(options: argparse.Namespace) -> int:
    """The exit code. Raises ValueError for a model that cannot be had and for wrong options."""
    if options.draft is None:
        raise ValueError('name two models, the target and the draft, as in make doctor PAIR="target draft": folders or Hugging Face ids')
    settings = _settings(options)
    folders = {who: obtain_model(getattr(options, who), field=who) for who in ("target", "draft")}
    chat = not options.plain_text
    findings, parts = inspect_pair(
        folders["target"],
        folders["draft"],
        chat=chat,
        check_values=("target", "draft"),
        trust_remote_code=options.trust_remote_code,
    )
    probe = None
    reason = "the probe was left out (--no-probe)"
    if not errors(findings) and not options.no_probe:
        more, probe, reason = _probe(options, settings, folders)
        findings = [*findings, *more]
    answer = answer_of(findings, probe, reason=reason, asked=not options.no_probe)
    lines = checklist(findings, parts, chat=chat)
    _show(lines, probe, answer)
    if options.json is not None:
        _write(options.json, lines, findings, probe, answer)
    return answer.exit_code


def _settings(options: argparse.Namespace) -> ProbeSettings:
    if options.seconds <= 0 or not 1 <= options.max_gamma <= 16:
        raise ValueError(
            f"--seconds {options.seconds:g} must be > 0, and --max-gamma {options.max_gamma} between 1 and 16"
        )
    if min(options.temperature) < 0:
        raise ValueError(f"--temperature {options.temperature}: must be 0 or more")
    return ProbeSettings(options.seconds, options.max_gamma, tuple(dict.fromkeys(options.temperature)))


def _probe(
    options: argparse.Namespace, settings: ProbeSettings, folders: dict[str, Path]
) -> tuple[list[Finding], Probe | None, str]:
    """Findings of loading the models, and the probe or the reason why there is none."""
    try:
        models, found = _load(options, folders)
    except MissingPackageError as error:  # nothing against the pair
        return [], None, str(error)
    if errors(found):
        return found, None, ""
    target, draft, vocab_ids = models["target"], models["draft"], read_vocab_shortlist(folders["draft"])
    context = context_length(target.config)  # the draft's is no shorter, or there would be a finding
    deadline_s = time.perf_counter() + settings.seconds
    try:
        settings = settings.within(context)
        times = time_steps(target, draft, settings, draft_vocab_ids=vocab_ids)
    except ValueError as error:
        return found, None, f"the native runtime cannot measure it: {error}"
    asking_ms = MAX_QUESTION_TOKENS * ASKING_BATCHES * times.target_ms[-1]
    can_ask = asking_ms < 1e3 * ASKING_SHARE * settings.seconds
    prompts = _prompts(options, folders["target"], models, vocab_ids, can_ask=can_ask)
    fitting = [ids for ids in prompts if context is None or len(ids) + settings.max_new_tokens <= context]
    if not fitting:
        reason = f"no prompt fits into the context of {context} positions (--prompts FILE with shorter ones)"
        return found, None, reason
    try:
        probe = run_probe(
            target, draft, fitting, times, settings, deadline_s=deadline_s, draft_vocab_ids=vocab_ids
        )
    except ValueError as error:
        return found, None, str(error)
    return found, probe, ""


def _load(
    options: argparse.Namespace, folders: dict[str, Path]
) -> tuple[dict[str, PreTrainedModel], list[Finding]]:
    """Both models, as far as they can be loaded, and what is wrong with them.

    Raises:
        MissingPackageError: one of them needs what is not installed.
    """
    trust, dtype = options.trust_remote_code, options.dtype or _dtype_of(folders["target"], options)
    models: dict[str, PreTrainedModel] = {}
    found: list[Finding] = []
    for who, folder in folders.items():
        try:
            models[who] = load_causal_lm(str(folder), dtype, trust, field=who)
        except MissingPackageError:
            raise
        except ValueError as error:
            return models, [Finding("unloadable", ERROR, str(error))]
        found += check_loaded(models[who], who=who)
    return models, found


def _dtype_of(target: Path, options: argparse.Namespace) -> str:
    dtype = AutoConfig.from_pretrained(target, trust_remote_code=options.trust_remote_code).dtype
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else "bfloat16"


def _prompts(
    options: argparse.Namespace,
    target: Path,
    models: dict[str, PreTrainedModel],
    vocab_ids: Tensor | None,
    *,
    can_ask: bool,
) -> list[list[int]]:
    """Given ones, or invented ones where there is time for it and any come out, or the fixed ones."""
    chat, tokenizer = not options.plain_text, load_tokenizer(str(target), options.trust_remote_code)
    if options.prompts is not None:
        return given_prompts(options.prompts, tokenizer, chat=chat)
    asked = []
    if chat and can_ask:
        asked = self_asked_prompts(
            models["target"], models["draft"], tokenizer, draft_vocab_ids=vocab_ids, seed=0
        )
    return asked or fixed_prompts(tokenizer, chat=chat)


def _show(lines: list[Line], probe: Probe | None, answer: Answer) -> None:
    width = Console().width
    console = Console(highlight=False, width=width if sys.stdout.isatty() else max(width, 120))
    console.print(checklist_table(lines))
    num_warnings = sum(line.status == WARNING for line in lines)
    if num_warnings:
        console.print(f"{num_warnings} warning(s): they forbid nothing")
    if probe is not None:
        console.print(probe_table(probe))
    console.print(f"[bold]{answer.word}[/]: {escape(answer.why)}", soft_wrap=True)


def _write(
    path: Path, lines: list[Line], findings: list[Finding], probe: Probe | None, answer: Answer
) -> None:
    content: dict[str, Any] = {
        "answer": asdict(answer),
        "checks": [asdict(line) for line in lines],
        "findings": [asdict(finding) for finding in findings],
        "probe": None if probe is None else asdict(probe),
    }
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--json {path}: cannot be written: {error}") from error


if __name__ == "__main__":
    main()
