"""Are the plan's formulas right? `python -m pipeline.plan.check [corpus=FOLDER]` measures tiny models on this machine.

Sizes must agree: what PyTorch holds is counted. Times are compared as a ratio, with peaks that are measured here first. Exit
code 1 when a size is off by more than its row allows.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from rich.table import Table
from torch import Tensor

from distill.config import LossConfig
from distill.head import LMHead, chunked_head_loss
from distill.objective import Objective
from eval.random_bench import build_model
from eval.shapes import SHAPES
from pipeline.commands import run_command
from pipeline.console import result_console
from pipeline.estimates import TOKEN_BYTES, measure_rates
from pipeline.plan import formulas
from pipeline.plan.formulas import FP32_BYTES
from pipeline.plan.gpus import GpuType
from pipeline.plan.measure import (
    bandwidth_gb_s,
    bf16_tflops,
    peak_bytes,
    saved_bytes,
    storage_bytes,
    tiny_model,
)
from pipeline.plan.shapes import FAMILIES, shape_of_config
from pipeline.plan.stages import corpus_bytes_per_token
from pipeline.schema import Config

NUM_TOKENS = 96
EXIT_OFF = 1
CORPUS = Path("artifacts/latest/corpus")


@dataclass(frozen=True)
class Check:
    """`allowed` is how far measured / formula may be from 1; None where only the ratio is told."""

    what: str
    formula: float
    measured: float
    unit: str
    allowed: float | None = 0.0

    @property
    def ratio(self) -> float:
        """measured / formula."""
        return self.measured / self.formula

    @property
    def is_right(self) -> bool:
        """Whether the ratio is as near to 1 as it must be."""
        return self.allowed is None or abs(self.ratio - 1) <= self.allowed


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and leave with `EXIT_OFF` where a size is wrong.

    Raises:
        ValueError: another word than corpus=FOLDER, or a folder without shards.
    """
    unknown = [word for word in words if not word.startswith("corpus=")]
    if unknown:
        raise ValueError(f"{unknown}: only corpus=FOLDER can be given, the folder of a finished corpus stage")
    folder = Path(words[-1].removeprefix("corpus=")) if words else CORPUS
    checks = [disk_check(folder)] if words or (folder / "shards").is_dir() else []
    checks += [check for family in FAMILIES for check in family_checks(family)]
    checks += [*training_checks(), logits_check(is_live=False), logits_check(is_live=True), *time_checks()]
    table = Table(
        "what", "formula", "measured", "unit", "measured / formula", "verdict", title="the plan's formulas on this machine"
    )
    for check in checks:
        verdict = "ratio only" if check.allowed is None else "right" if check.is_right else "OFF"
        table.add_row(check.what, f"{check.formula:,.6g}", f"{check.measured:,.6g}", check.unit, f"{check.ratio:.3f}", verdict)
    console = result_console()
    console.print(table)
    if not all(check.is_right for check in checks):
        sys.exit(EXIT_OFF)


def family_checks(family: str) -> list[Check]:
    """Parameters, their bytes, and the KV cache of one family, tied and untied."""
    checks = []
    for is_tied in (True, False):
        model = tiny_model(family, is_tied=is_tied)
        shape = shape_of_config(model.config, name=family)
        what = f"{family}, {'tied' if is_tied else 'untied'}"
        parameters = list(model.parameters())
        held = sum(storage_bytes(parameters).values())
        checks.append(Check(f"{what}: parameters", shape.num_parameters, sum(p.numel() for p in parameters), ""))
        checks.append(Check(f"{what}: weights", formulas.weight_bytes(shape, FP32_BYTES), held, "bytes"))
    with torch.no_grad():
        cache = model(input_ids=torch.ones((1, 8), dtype=torch.long), use_cache=True).past_key_values
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    formula = formulas.kv_bytes_per_position(shape, FP32_BYTES)
    checks.append(Check(f"{family}: KV cache", formula, held / 8, "bytes a position"))
    return checks


def training_checks(family: str = "llama") -> list[Check]:
    """Gradients, AdamW's moments and saved activations of a draft with frozen embeddings, under bf16 autocast."""
    model = tiny_model(family)
    model.get_input_embeddings().weight.requires_grad_(False)
    shape = shape_of_config(model.config, name=family)
    saved = sum(saved_bytes(model, NUM_TOKENS).values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    optimiser.step()
    gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    moments = sum(state[name].nbytes for state in optimiser.state.values() for name in ("exp_avg", "exp_avg_sq"))
    num_trained = formulas.trainable_parameters(shape, train_embeddings=False)
    # The CPU's attention works in fp32 (distill/packed_attention.py), a GPU's in bf16.
    per_token = formulas.saved_bytes_per_token(shape, attention_bytes=FP32_BYTES)
    return [
        Check(f"{family}: gradients", FP32_BYTES * num_trained, gradients, "bytes"),
        Check(f"{family}: AdamW's moments", formulas.OPTIMISER_BYTES * num_trained, moments, "bytes"),
        Check(
            f"{family}: saved for the backward pass, {NUM_TOKENS} tokens",
            formulas.saved_weight_bytes(shape) + NUM_TOKENS * per_token, saved, "bytes", allowed=0.02,
        ),
    ]  # fmt: skip


def logits_check(*, is_live: bool, num_tokens: int = 64, vocab_size: int = 20000) -> Check:
    """The peak of one chunk's loss, forward KL from the top 64 or from a live target, against `head_chunk_bytes`."""
    objective = Objective(LossConfig())
    hidden_SH = torch.randn(num_tokens, 16, requires_grad=True)
    head = LMHead(torch.randn(vocab_size, 16).bfloat16(), None, 1.0, None)
    ids_SK = torch.arange(64).expand(num_tokens, -1)
    logp_SK = torch.full((num_tokens, 64), -5.0)
    tokens_S = torch.zeros(num_tokens, dtype=torch.long)

    def loss_of(logits_CV: Tensor, start: int, end: int) -> Tensor:
        if not is_live:
            return objective.topk(ids_SK[start:end], logp_SK[start:end], logits_CV, tokens_S[start:end])
        target_CV = head.project(hidden_SH.detach()[start:end], torch.bfloat16)
        return objective.full(target_CV, logits_CV, tokens_S[start:end], None)

    def step() -> None:
        chunked_head_loss(hidden_SH, head, loss_of, chunk_tokens=num_tokens, compute_dtype=torch.bfloat16)

    shape = replace(shape_of_config(tiny_model("llama").config, name="llama"), vocab_size=vocab_size)
    formula = formulas.head_chunk_bytes(shape, num_tokens, has_live_teacher=is_live)
    what = f"logits of {num_tokens} positions, {'live' if is_live else 'cached'} teacher: peak"
    return Check(what, formula, peak_bytes(step), "bytes", allowed=0.1)


def disk_check(folder: Path) -> Check:
    """The shards' bytes against token ids and candidates by formula.

    Raises:
        ValueError: no shards in the folder.
    """
    files = sorted((folder / "shards").glob("*.parquet"))
    if not files:
        raise ValueError(f"corpus={str(folder)!r}: holds no shards/*.parquet; name the folder of a corpus stage")
    table = pq.read_table(files, columns=["prompt_token_ids", "response_token_ids", "topk_ids"])
    names = ("prompt_token_ids", "response_token_ids")
    num_prompt, num_response = (pc.sum(pc.list_value_length(table[name])).as_py() for name in names)
    num_candidates = pc.sum(pc.list_value_length(pc.list_flatten(table["topk_ids"]))).as_py() or 0
    per_token = corpus_bytes_per_token(round(num_candidates / num_response))["stored"]
    formula = num_response * per_token + TOKEN_BYTES * num_prompt
    return Check("corpus on disk", formula, sum(file.stat().st_size for file in files), "bytes", allowed=0.15)


def time_checks() -> list[Check]:
    """Decoding and a training step of SmolLM2-135M's shape with random weights, in seconds, against peaks measured here."""
    machine = GpuType("this machine", 1, bandwidth_gb_s(), bf16_tflops(), 1)
    models = [
        build_model(SHAPES[name], dtype=torch.bfloat16, device="cpu", max_tokens=512)
        for name in ("smollm2_135m", "draft_30m")
    ]
    target, draft = (shape_of_config(model.config, name="random") for model in models)
    checks, config = [], Config()
    for batch in (1, 32):
        config.corpus.batch_size, config.train.tokens_per_step = batch, 512
        rates = measure_rates(config, *models)
        step = formulas.decode_step(target, machine, batch=batch, context=18)
        what = f"a decoding step of {batch} row{'s' if batch > 1 else ''}, bound by {step.bound}"
        checks.append(Check(what, step.seconds, batch / rates.corpus_tokens_per_second, "s", allowed=None))
    flops = 3 * 512 * (formulas.layer_flops(draft, context=128) + formulas.head_flops(draft))
    what = "a training step of 512 tokens, bound by compute"
    checks.append(Check(what, flops / machine.bf16_tflops / 1e12, rates.train_step_s, "s", allowed=None))
    return checks


if __name__ == "__main__":
    run_command(main)
