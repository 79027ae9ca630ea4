"""Target and draft as GGUF files for llama.cpp: `python -m pipeline.gguf_export [TARGET DRAFT] [--types f16 q8_0]`.

Without a pair it takes the one of the last run (`artifacts/latest/export`). Beside the files lies `pair.json`, with the
gamma that was exported, and `llama-server.sh`, a start line.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gguf import GGUFReader

from pipeline.compat import read_json
from pipeline.errors import EXIT_USER_MISTAKE, message_of
from pipeline.gguf_export_model import FILE_TYPES, write_gguf
from pipeline.models import load_causal_lm, load_tokenizer, obtain_model
from pipeline.store import write_json

EXPORT_DIR = Path("artifacts/latest/export")
DEFAULT_GAMMA = 4

LLAMA_SERVER_SH = """#!/bin/sh
# Start llama.cpp's server with the draft; further words go to llama-server. Another format: TYPE=f16 ./llama-server.sh
cd "$(dirname "$0")" || exit 1
type=${{TYPE:-{file_type}}}
exec llama-server --model "target-$type.gguf" --model-draft "draft-$type.gguf" --spec-type draft-simple \\
  --spec-draft-n-max {gamma} --spec-draft-n-min 0 --spec-draft-p-min 0 "$@"
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Write the files; leave with 0, or with 2 and the reason."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.gguf_export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pair", nargs="*", metavar="MODEL", help="target and draft: folders or Hugging Face ids"
    )
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"], choices=sorted(FILE_TYPES))
    parser.add_argument("--out", type=Path, default=Path("artifacts/gguf"), help="(default: artifacts/gguf)")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    try:
        for path in export_gguf(options.pair, options.out, options.types, options.trust_remote_code):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
    except Exception as error:
        if (message := message_of(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(EXIT_USER_MISTAKE)
    sys.exit(0)


def export_gguf(
    pair: Sequence[str], out: Path, file_types: Sequence[str], trust_remote_code: bool = False
) -> list[Path]:
    """Write target and draft in every type; return the GGUF files.

    Raises:
        ValueError: no such pair, a model that cannot be written as GGUF, or a folder that cannot be written.
    """
    target, draft = _pair(pair)
    gamma = read_json(Path(draft) / "draftsmith.json").get("best_gamma", DEFAULT_GAMMA)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written: {error}") from error
    written = []
    for who, name in (("target", target), ("draft", draft)):
        folder = obtain_model(name, field=who)
        model = load_causal_lm(str(folder), "float32", trust_remote_code, device="cpu", field=who)
        tokenizer = load_tokenizer(str(folder), trust_remote_code, field=who)
        for file_type in file_types:
            path = out / f"{who}-{file_type}.gguf"
            write_gguf(path, model, tokenizer, file_type=file_type, name=Path(name).name)
            _check_written(path, vocab_size=model.config.get_text_config().vocab_size)
            written.append(path)
    _write_around(out, gamma=int(gamma), file_type=file_types[-1], pair={"target": target, "draft": draft})
    return written


def _pair(given: Sequence[str]) -> tuple[str, str]:
    if len(given) == 2:
        return given[0], given[1]
    if given:
        raise ValueError(f"one target and one draft are needed, {len(given)} given: {list(given)}")
    if not (EXPORT_DIR / "report.json").is_file():
        raise ValueError(
            f"no pair given, and {EXPORT_DIR} holds no export: run `make distill`, or name a target and a draft"
        )
    return str(read_json(EXPORT_DIR / "report.json")["target"]["path"]), str(EXPORT_DIR / "draft")


def _check_written(path: Path, *, vocab_size: int) -> None:
    """Read the file back: as many tokens as the head has rows, and every tensor where it should be."""
    reader = GGUFReader(path)
    num_tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert num_tokens == vocab_size == int(embedding.shape[1]), (num_tokens, vocab_size, embedding.shape)


def _write_around(out: Path, *, gamma: int, file_type: str, pair: dict[str, Any]) -> None:
    write_json(out / "pair.json", {**pair, "num_speculative_tokens": gamma})
    script = out / "llama-server.sh"
    script.write_text(LLAMA_SERVER_SH.format(file_type=shlex.quote(file_type), gamma=gamma), encoding="utf-8")
    script.chmod(0o755)


if __name__ == "__main__":
    main()
