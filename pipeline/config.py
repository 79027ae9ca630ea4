"""Hydra's side of the configuration: where the YAML files lie, the schema, and checked objects out of them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from distill.config import refuse_for_medusa
from pipeline.remote_store import with_local_prompts
from pipeline.schema import STAGE_NAMES, Config, TargetConfig

_PACKAGE_DIR = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The folder of the YAML files: `conf/` of the checkout, or its copy inside an installed package."""
    for folder in (_PACKAGE_DIR.parent / "conf", _PACKAGE_DIR / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ValueError(f"no conf/config.yaml beside {_PACKAGE_DIR} or in it: reinstall the package")


def register_schema() -> None:
    """Make the dataclasses known to Hydra as `base_schema`, the first entry of every defaults list."""
    ConfigStore.instance().store(name="base_schema", node=_schema())


def _schema() -> DictConfig:
    schema = cast(DictConfig, OmegaConf.structured(Config))
    # Mappings are merged, not replaced: a default weight here would stay in every other loss.
    schema.loss.weights = {}
    OmegaConf.set_struct(schema.loss.weights, False)  # its keys are data; LossConfig checks them
    OmegaConf.set_struct(schema.corpus.engine_args, False)  # the engine checks them
    return schema


def to_config(composed: DictConfig) -> Config:
    """Resolve a composed configuration and check it, field by field and across groups.

    Raises:
        ValueError: a value that cannot work, named with its field.
    """
    unknown = unknown_keys(composed)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such setting; --cfg job lists all that there are")
    config = cast(Config, OmegaConf.to_object(composed))
    for name, number in _numbers(asdict(config)):
        if not math.isfinite(number):  # nan passes every comparison, and so the checks of the groups
            raise ValueError(f"{name}={number}: give a finite number, or null where the setting allows it")
    for seed in (config.seed, config.corpus.seed, config.train.seed, config.eval.seed, config.bench.seed):
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}: choose one from 0 to {2**32 - 1}, which all random generators take")
    _check_stages(config.stages)
    # A null would mean the embedded target, a copied draft, self-asked prompts; the options that need a place say "".
    for field, value in (
        ("target.path", config.target.path),
        ("draft.path", config.draft.path),
        ("corpus.prompts", config.corpus.prompts),
        ("eval.prompts", config.eval.prompts),
        ("bench.prompts", config.bench.prompts),
    ):
        if value == "":
            raise ValueError(
                f"{field} has no value: give it, as in {field}=<folder, file or Hugging Face id>"
            )
    if config.target.path is not None and config.target.random is not None:
        raise ValueError(
            f"target.path={config.target.path} and target.random are both set: choose one target"
        )
    if config.target.revision is not None and (config.target.path is None or Path(config.target.path).is_dir()):
        raise ValueError(
            f"target.revision={config.target.revision}: only a Hugging Face id as target.path has revisions; leave it null"
        )
    if config.target.path is not None and config.target.name == TargetConfig().name:
        config.target.name = Path(config.target.path).name  # the embedded target's name would be a lie
    if "distill" in config.stages:
        _check_training(config)
    if config.draft.init_is_medusa:
        _check_medusa(config)
    return with_local_prompts(config)


def _check_training(config: Config) -> None:
    """What would come to nothing, without a word."""
    if config.loss.needs_cached_probabilities and config.corpus.topk == 0:
        raise ValueError(
            f"corpus.topk=0 stores none of the target's probabilities, which loss.weights={dict(config.loss.weights)} trains on: raise "
            "it, or choose loss.teacher=online or loss=cross_entropy"
        )
    for name in ("min_speedup", "min_acceptance"):
        if getattr(config.gate, name) is not None and "export" not in config.stages:
            raise ValueError(
                f"gate.{name}={getattr(config.gate, name)} is held against the report, which the export stage writes: add export to "
                "stages, or leave the gate out"
            )


def _check_medusa(config: Config) -> None:
    """What only a draft model can do would fail late, after the training."""
    # It brings in torch, which settings of a draft model do not need.
    from eval.bench_conditions import tree_of

    for name in ("preflight", "export"):
        if name in config.stages:
            raise ValueError(
                f"stages={config.stages}: {name} is for draft models; with draft=medusa set stages=[corpus,distill,eval,bench]"
            )
    refuse_for_medusa(config.train)
    if config.corpus.max_new_tokens <= (config.draft.num_heads or 0):
        raise ValueError(
            f"corpus.max_new_tokens={config.corpus.max_new_tokens}: with draft.num_heads={config.draft.num_heads} the last head learns "
            "from longer answers only; raise it, or lower draft.num_heads"
        )
    if config.launch.engine is not None:
        raise ValueError(f"launch.engine={config.launch.engine}: Medusa heads are trained in one process; set it to null")
    bench, num_heads = config.bench, config.draft.num_heads
    others = sorted({"hf_assisted", "vllm"} & set(bench.backends))
    if others:
        raise ValueError(f"bench.backends: {others} cannot serve Medusa heads; leave them out")
    if bench.auto_gamma:
        raise ValueError("bench.auto_gamma=true: with draft=medusa all heads run at once; set it to false")
    for name, depths in (("gammas", bench.gammas), ("trees", [tree_of(tree).depth for tree in bench.trees])):
        if max(depths, default=0) > (num_heads or 0):
            raise ValueError(
                f"bench.{name}={list(getattr(bench, name))}: draft.num_heads={num_heads} propose no more tokens than that"
            )


def unknown_keys(node: DictConfig, prefix: str = "") -> list[str]:
    """Keys that the dataclasses do not have: Hydra lets `+key=value` put them in."""
    schema = OmegaConf.get_type(node)
    assert schema is not None
    assert is_dataclass(schema)
    known = {field.name for field in fields(schema)}
    unknown = [f"{prefix}{key!s}" for key in node if key not in known]
    for key, value in node.items():
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            unknown += unknown_keys(value, f"{prefix}{key!s}.")
    return unknown


def _numbers(values: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """Every float in nested dictionaries and lists, with its name."""
    if isinstance(values, float):
        yield field, values
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _numbers(value, f"{field}.{name}" if field else str(name))
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, field)


def _check_stages(stages: list[str]) -> None:
    unknown = [name for name in stages if name not in STAGE_NAMES]
    if unknown or not stages:
        raise ValueError(f"stages={stages}: unknown {unknown}; choose from {list(STAGE_NAMES)}")
