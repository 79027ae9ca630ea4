"""The doctor's answer in one sentence: yes, no, or a bad pair, and why."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from pipeline.compat import Finding, errors
from pipeline.doctor_probe import Probe, TemperatureProbe
from pipeline.errors import EXIT_GATE, EXIT_USER_MISTAKE
from pipeline.verdict import HIGHEST_PLAUSIBLE_ACCEPTANCE

YES, NO, BAD_PAIR, NOT_MEASURED = "yes", "no", "bad pair", "not measured"
EXIT_CODES = {YES: 0, NO: EXIT_GATE, BAD_PAIR: EXIT_USER_MISTAKE, NOT_MEASURED: EXIT_GATE}


@dataclass(frozen=True)
class Answer:
    """`word` is yes, no, bad pair or not measured."""

    word: str
    why: str
    exit_code: int


def answer_of(
    findings: Iterable[Finding], probe: Probe | None, *, reason: str = "", asked: bool = True
) -> Answer:
    """What is to be said, and the exit code.

    Args:
        reason: why there is no probe.
        asked: a probe was asked for; a checklist that was all that was wanted, and is clean, ends with 0.
    """
    if bad := errors(findings):
        codes = ", ".join(dict.fromkeys(finding.code for finding in bad))
        return Answer(BAD_PAIR, f"{len(bad)} of the findings above forbid it: {codes}", EXIT_CODES[BAD_PAIR])
    if probe is None:
        return Answer(NOT_MEASURED, f"the pair fits; {reason}", EXIT_CODES[NOT_MEASURED] if asked else 0)
    paying = [one for one in probe.by_temperature if one.best.speedup.low > 1]
    word = YES if paying else NO
    said = [_sentence(probe, one) for one in probe.by_temperature]
    if not paying:
        said.append(_way_out(probe))
    return Answer(word, ". ".join(said), EXIT_CODES[word])


def _sentence(probe: Probe, one: TemperatureProbe) -> str:
    best, times = one.best, probe.times
    speed = best.speedup
    interval = f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"
    if speed.low > 1:
        verdict = f"pays, predicted {interval} of plain decoding"
    elif speed.high < 1:
        verdict = f"does not pay, the best predicted is {interval} of plain decoding"
    else:
        verdict = f"no gain is shown, predicted {interval} of plain decoding"
    needed = probe.break_even[best.gamma]
    even = (
        "no acceptance would be enough"
        if needed is None
        else f"break-even is an acceptance of {needed:.2f}, measured were {one.acceptance.value:.2f}"
    )
    return (
        f"temperature {one.temperature:g}: {verdict}, at gamma {best.gamma} ({even}; {best.tau.value:.2f} tokens per target "
        f"forward, {one.num_tokens} tokens of {one.num_prompts} answers; a draft step costs {times.cost_ratio:.2f} target steps)"
    )


def _way_out(probe: Probe) -> str:
    plausible = [
        gamma
        for gamma, value in probe.break_even.items()
        if value is not None and value < HIGHEST_PLAUSIBLE_ACCEPTANCE
    ]
    if not plausible:
        return (
            "No plausible acceptance pays at any gamma here: the draft's step is too dear beside the target's; take fewer layers, "
            "a shortlisted head, or another device"
        )
    if any(one.best.speedup.high > 1 for one in probe.by_temperature):
        return "More time narrows the intervals (--seconds 120); prompts of your own traffic tell more (--prompts FILE)"
    return "A draft that is distilled on this target's own text, or on your traffic, is accepted more often"


def probe_table(probe: Probe) -> Table:
    """Each gamma: break-even, and tokens per target forward and predicted speedup at each temperature."""
    times = probe.times
    widths = ", ".join(f"{ms:.2f}" for ms in times.target_ms)
    table = Table(
        title=f"the probe: target step over 1, 2, ... tokens {widths} ms; draft step {times.draft_ms:.2f} ms; "
        f"round overhead {times.overhead_ms:.2f} ms; batch 1",
        caption="break-even: the acceptance from which on it pays; tau: tokens per target forward; speedups are predicted from "
        "these times and the acceptance that was counted per position, with 95% intervals over prompts",
    )
    table.add_column("gamma", justify="right")
    table.add_column("break-even", justify="right")
    for one in probe.by_temperature:
        table.add_column(f"T={one.temperature:g} tau", justify="right")
        table.add_column("speedup", justify="right")
    for gamma, needed in probe.break_even.items():
        cells = [str(gamma), "never" if needed is None else f"{needed:.2f}"]
        for one in probe.by_temperature:
            outlook = one.outlooks[gamma - 1]
            speed = outlook.speedup
            shown = f"{speed.value:.2f} [{speed.low:.2f}, {speed.high:.2f}]".replace("[", r"\[")
            cells += [f"{outlook.tau.value:.2f}", f"[bold green]{shown}[/]" if speed.low > 1 else shown]
        table.add_row(*cells)
    table.add_section()
    table.add_row(
        "acceptance",
        "",
        *(cell for one in probe.by_temperature for cell in (f"{one.acceptance.value:.3f}", "")),
    )
    return table
