"""Medusa's heads (arXiv 2401.10774): small networks on the target's last hidden state, one for each token further ahead.

The hidden state at the position of a token gives, by the target's own head, the token after it; head k gives the one k later.

Shape legend: B rows, K heads, H hidden size, N ids that the heads score (the whole vocabulary, or a shortlist), P probed rows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.loading import dtype_of

CONFIG_FILE, WEIGHTS_FILE, FORMAT_VERSION = "medusa_config.json", "medusa_heads.safetensors", 1
NUM_PROBED_ROWS = 8


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of a set of heads. `vocab_size`: of the target's head. `num_ids`: columns of each head, N."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_ids: int
    has_bias: bool = False


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). With W = 0, as it starts, it changes nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads: `num_layers` residual blocks, then a linear layer of N ids.

    Args:
        shape: sizes. vocab_ids_N: the ids of the columns, ascending. probe_PH: some rows of the head of the target that they
            were made for, by which another target is told.
    """

    def __init__(self, shape: MedusaShape, *, vocab_ids_N: Tensor, probe_PH: Tensor) -> None:
        super().__init__()
        assert len(vocab_ids_N) == shape.num_ids
        self.shape = shape
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape.hidden_size) for _ in range(shape.num_layers)))
            for _ in range(shape.num_heads)
        )
        self.rows = nn.ModuleList(
            nn.Linear(shape.hidden_size, shape.num_ids, bias=shape.has_bias) for _ in range(shape.num_heads)
        )
        self.vocab_ids_N: Tensor
        self.probe_PH: Tensor
        self.register_buffer("vocab_ids_N", vocab_ids_N.clone())
        self.register_buffer("probe_PH", probe_PH.clone())

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.probe_PH.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number format."""
        return cast(nn.Linear, self.rows[0]).weight.dtype

    def forward(self, hidden_BH: Tensor, num_heads: Optional[int] = None) -> Tensor:
        """Logits [B, K, N] of the first `num_heads` heads (None: all), from the target's last hidden states."""
        hidden_BH = hidden_BH.to(self.dtype)
        pairs = list(zip(self.blocks, self.rows, strict=True))[:num_heads]
        return torch.stack([rows(blocks(hidden_BH)) for blocks, rows in pairs], dim=1)

    def require_target(self, target: PreTrainedModel) -> None:
        """Raises ValueError when these heads were made for another target; names what differs."""
        rows, width = target.get_output_embeddings().weight.shape
        for name, own, its in (
            ("hidden_size", self.shape.hidden_size, width),
            ("vocab_size", self.shape.vocab_size, rows),
        ):
            if own != its:
                raise ValueError(
                    f"Medusa heads: made for a target with {name}={own}, this one has {its}; train heads for this target"
                )
        probe_PH = probe_of(target).to(self.device)
        if not torch.allclose(probe_PH, self.probe_PH.float(), rtol=0.02, atol=0.02 * float(probe_PH.std())):
            raise ValueError(
                f"Medusa heads: {type(target).__name__} is not the target that they were trained on (its head has other "
                "weights); train heads for this target"
            )

    def save(self, folder: Path) -> None:
        """Writes `medusa_heads.safetensors` and `medusa_config.json` into a new folder."""
        folder.mkdir(parents=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = {"format_version": FORMAT_VERSION, **asdict(self.shape)}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def probe_of(target: PreTrainedModel) -> Tensor:
    """[P, H] fp32: rows of the target's head, evenly spaced."""
    weight_VH: Tensor = target.get_output_embeddings().weight.detach()
    at_P = torch.linspace(0, weight_VH.shape[0] - 1, NUM_PROBED_ROWS).long().to(weight_VH.device)
    return weight_VH[at_P].float()


def heads_of_target(
    target: PreTrainedModel, *, num_heads: int, num_layers: int, vocab_ids: Optional[Sequence[int]] = None
) -> MedusaHeads:
    """Untrained fp32 heads: blocks that change nothing, and the target's own rows, so that each starts as the target's head (but for
    a scale or cap of its logits, which some architectures have).

    Args:
        vocab_ids: ascending ids that the heads are trimmed to; None for all.

    Raises:
        ValueError: ids that are not ascending, or that the target lacks.
    """
    head = target.get_output_embeddings()
    num_rows, hidden_size = head.weight.shape
    ids_N = torch.arange(num_rows) if vocab_ids is None else torch.as_tensor(vocab_ids, dtype=torch.long)
    if not len(ids_N) or bool((ids_N.diff() <= 0).any()) or int(ids_N[0]) < 0 or int(ids_N[-1]) >= num_rows:
        raise ValueError(
            f"vocab_ids: give ids from 0 to {num_rows - 1}, each once, in ascending order (draft.vocab_shortlist makes such a list)"
        )
    has_bias = getattr(head, "bias", None) is not None
    shape = MedusaShape(num_heads, num_layers, hidden_size, num_rows, len(ids_N), has_bias)
    heads = MedusaHeads(shape, vocab_ids_N=ids_N, probe_PH=probe_of(target).cpu())
    with torch.no_grad():
        for rows in heads.rows:
            assert isinstance(rows, nn.Linear)
            rows.weight.copy_(head.weight[ids_N.to(head.weight.device)])
            if has_bias:
                rows.bias.copy_(head.bias[ids_N.to(head.weight.device)])
    return heads.to(target.device)


def load_medusa_heads(folder: str | Path, dtype: torch.dtype | str = torch.bfloat16) -> MedusaHeads:
    """Heads that `MedusaHeads.save` wrote.

    Args:
        dtype: a torch dtype or its name, e.g. "bfloat16".

    Raises:
        ValueError: the folder holds no heads, heads of another format, or weights that do not fit their config.
    """
    folder = Path(folder)
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: no Medusa heads (it lacks {', '.join(missing)})")
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    version = config.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"{folder / CONFIG_FILE}: format_version={version!r}, this version reads {FORMAT_VERSION}")
    state = load_file(folder / WEIGHTS_FILE)
    try:
        heads = MedusaHeads(
            MedusaShape(**config), vocab_ids_N=state["vocab_ids_N"], probe_PH=state["probe_PH"]
        )
        heads.load_state_dict(state)
    except (TypeError, KeyError, AssertionError, RuntimeError) as error:
        raise ValueError(f"{folder}: the weights do not fit {CONFIG_FILE} ({error})") from error
    return heads.to(dtype_of(dtype)).eval()
