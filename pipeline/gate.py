"""The gate: values that a run must reach, read from the report. A set value that was not measured is a failure too."""

from pipeline.report import Report, headline_acceptance, headline_speedup
from pipeline.schema import GateConfig


def gate_failures(report: Report, gate: GateConfig) -> list[str]:
    """Which gates the report fails, each as a sentence; [] when all are passed.

    `min_speedup` is compared with the best gamma's measured walltime_speedup, `min_acceptance` with the distilled
    draft's acceptance_rate, both at the lowest temperature that was measured.
    """
    failures = []
    speedup, acceptance = headline_speedup(report), headline_acceptance(report)
    if gate.min_speedup is not None:
        if speedup is None:
            failures.append(
                f"gate.min_speedup={gate.min_speedup}: no speedup of the distilled draft was measured"
            )
        elif not speedup["walltime_speedup"] >= gate.min_speedup:  # a NaN reaches nothing
            failures.append(
                f"gate.min_speedup={gate.min_speedup}: the best measured speedup is {speedup['walltime_speedup']:.3f} "
                f"(gamma {speedup['gamma']}, temperature {speedup['temperature']:g})"
            )
    if gate.min_acceptance is not None:
        if acceptance is None:
            failures.append(
                f"gate.min_acceptance={gate.min_acceptance}: no acceptance of the distilled draft was measured"
            )
        elif not acceptance["value"] >= gate.min_acceptance:
            failures.append(
                f"gate.min_acceptance={gate.min_acceptance}: the distilled draft's acceptance_rate is {acceptance['value']:.3f} "
                f"(temperature {acceptance['temperature']:g}, sampler {acceptance['sampler']})"
            )
    if gate.require_lossless:
        lossy = [
            f"{row['backend']} gamma {row['gamma']} temperature {row['temperature']:g}"
            for row in report["bench"]
            if row["lossless"] is False
        ]
        if lossy:
            failures.append(
                f"gate.require_lossless=true: the output differs from plain decoding's in {len(lossy)} rows: {', '.join(lossy)}"
            )
    return failures
