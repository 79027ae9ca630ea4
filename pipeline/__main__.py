"""The entry point: `python -m pipeline key=value ...`, also installed as `draftsmith`."""

import os
import sys
import traceback
from typing import NoReturn

import hydra
from omegaconf import DictConfig

from pipeline.config import conf_dir, register_schema, to_config
from pipeline.errors import (
    EXIT_CRASH,
    EXIT_GATE,
    EXIT_INTERRUPTED,
    EXIT_USER_MISTAKE,
    GateFailure,
    describe,
    message_of,
    print_anything,
)


class _Jobs:
    """The jobs of this process: one, or several in a multirun."""

    def __init__(self) -> None:
        self.gate_failures: list[str] = []

    def run(self, composed: DictConfig) -> None:
        try:
            config = to_config(composed)
            # After the checks: they bring in torch.
            if config.bench.target is not None:
                from pipeline.random_bench import run_shapes

                run_shapes(config)
            else:
                from pipeline.runner import run_stages

                run_stages(config)
        except GateFailure as failure:  # kept for the end, so that a multirun's other jobs still run
            self.gate_failures.append(str(failure))
            print(f"\ngate: {failure}", file=sys.stderr)
        except Exception as error:  # here and not in main(): Hydra would add lines of its own
            if (message := message_of(error)) is not None:
                _refuse(message)
            traceback.print_exc()
            sys.exit(EXIT_CRASH)


def main() -> None:
    """Run the pipeline and end the process with the exit code that `pipeline/errors.py` lists."""
    print_anything()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Hydra then hands its errors over instead of printing them and leaving with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # argparse takes key=value words in one stretch only, so `+experiment=tiny -m loss=tv,nla` would be refused.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    register_schema()
    jobs = _Jobs()
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(jobs.run)()
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:  # outside a job, a multirun's own folder is all that is written
        _refuse(f"artifacts_dir cannot be written: {error}")
    except Exception as error:  # of Hydra, while it composes: its kinds are many, assertions among them
        _refuse(describe(error))
    if jobs.gate_failures:
        sys.exit(EXIT_GATE)


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_USER_MISTAKE)


if __name__ == "__main__":
    main()
