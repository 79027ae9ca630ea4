"""The method as a list: what is done, in which order, out of what. `pipeline/runner.py` walks it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from distill.config import AUTO, OnPolicyConfig, TokenSelectionConfig
from pipeline.context import StageContext
from pipeline.corpus.mixture import sources_revision
from pipeline.models import ModelRef, content_revision, obtain_model
from pipeline.schema import Config
from pipeline.store import file_revision, fingerprint_of
from specdec_runtime.medusa_heads import CONFIG_FILE as HEADS_CONFIG
from specdec_runtime.medusa_heads import WEIGHTS_FILE as HEADS_WEIGHTS

StageFunction = Callable[[StageContext], dict[str, object]]
#: Whether something is switched on in a configuration, given as nested dicts.
Switch = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Stage:
    """One step. `config_keys` are the settings it reads beyond those of its upstream stages: a change of one makes its work anew.

    `version` is raised when the code of the stage changes what it makes. `function` is `module:name`, imported when
    the stage runs. `optional_keys` are settings that it reads only where something is switched on.
    """

    name: str
    version: int
    config_keys: tuple[str, ...]
    upstream: tuple[str, ...]
    function: str
    optional_keys: tuple[tuple[Switch, tuple[str, ...]], ...] = ()

    def keys_read(self, values: dict[str, Any]) -> tuple[str, ...]:
        """`config_keys`, and the optional ones that this configuration adds: a setting that nobody reads changes nothing."""
        added = (key for is_on, keys in self.optional_keys if is_on(values) for key in keys)
        return (*self.config_keys, *added)


def _asks_live_target(values: dict[str, Any]) -> bool:
    asks: bool = values["loss"]["teacher"] == "online"
    return asks


def _selects_tokens(values: dict[str, Any]) -> bool:
    return TokenSelectionConfig(**values["train"]["token_selection"]).enabled


def _has_on_policy_phase(values: dict[str, Any]) -> bool:
    return OnPolicyConfig(**values["train"]["on_policy"]).enabled


def _chooses_shortlist(values: dict[str, Any]) -> bool:
    is_auto: bool = values["draft"]["vocab_shortlist"] == AUTO
    return is_auto


#: Settings that the preflight estimates memory, disk and minutes from.
ESTIMATED_FROM = (
    "corpus.num_prompts",
    "corpus.samples_per_prompt",
    "corpus.max_prompt_tokens",
    "corpus.max_new_tokens",
    "corpus.max_question_tokens",
    "corpus.batch_size",
    "corpus.topk",
    "train.num_epochs",
    "train.max_steps",
    "train.max_minutes",
    "train.tokens_per_step",
    "train.gradient_accumulation_steps",
    "runtime.max_batch_size",
)

#: Settings that the distill stage chooses the size of the draft's head from.
TIMED_HEADS_FROM = (
    "draft.expected_acceptance",
    "preflight.max_gamma",
    "preflight.context_tokens",
    "preflight.num_repeats",
)

STAGES = (
    # What a target forward costs here, and so which draft and gamma can pay.
    Stage(
        "preflight",
        1,
        ("target", "draft", "preflight", *ESTIMATED_FROM),
        (),
        "pipeline.preflight:run_preflight",
        (
            (_asks_live_target, ("loss.teacher",)),
            (_selects_tokens, ("train.token_selection",)),
            (_has_on_policy_phase, ("train.on_policy", "train.max_sequence_tokens")),
        ),
    ),
    # Text that the target wrote, with its own log-probabilities.
    Stage("corpus", 2, ("target", "corpus"), (), "pipeline.corpus.stage:run_corpus"),
    # The draft, trained on that text.
    Stage(
        "distill",
        2,
        ("draft", "loss", "train", "corpus.held_out_fraction"),
        ("corpus",),
        "pipeline.stage_distill:run_distill",
        ((_chooses_shortlist, TIMED_HEADS_FROM),),
    ),
    # How often the target accepts it, on text that was held out.
    Stage("eval", 2, ("eval",), ("corpus", "distill"), "pipeline.stage_eval:run_eval"),
    # What that is worth by the clock.
    Stage("bench", 3, ("bench", "runtime"), ("corpus", "distill"), "pipeline.stage_bench:run_bench"),
    # A folder that any server loads, with the report.
    Stage(
        "export",
        3,
        ("export", "target.name"),
        ("preflight", "corpus", "distill", "eval", "bench"),
        "pipeline.export:run_export",
    ),
)

#: Places and labels: what lies there is in the fingerprint by its content instead.
NOT_IN_FINGERPRINT = frozenset(
    {
        "target.path",
        "target.revision",
        "target.name",
        "draft.path",
        "corpus.prompts",
        "corpus.mixture",
        # How the work is cut and carried; the rows and their order are the same.
        "corpus.shard_rows",
        "corpus.base_urls",
        "corpus.num_in_flight",
        "corpus.request_timeout_s",
        "corpus.max_retries",
        "corpus.ray_address",
        "corpus.ray_num_actors",
        "corpus.ray_cpus_per_actor",
        "corpus.ray_gpus_per_actor",
        "eval.prompts",
        "bench.prompts",
        "bench.medusa_heads",
        "preflight.min_free_disk_gib",
    }
)
#: Settings that came later: null or [], which is what was done before, leaves a fingerprint as it was.
NOT_IN_FINGERPRINT_IF_EMPTY = frozenset({"draft.num_heads", "bench.trees", "corpus.ray_engine", "train.eval_sampler"})
#: Settings of a group that not all of its readers read; those that do name them one by one.
NOT_IN_GROUP = frozenset({"corpus.held_out_fraction", "draft.expected_acceptance"})


def load_function(reference: str) -> StageFunction:
    """Import `module:name`."""
    module, name = reference.split(":")
    function: StageFunction = getattr(import_module(module), name)
    return function


def config_subtree(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The settings that a stage's fingerprint covers, flat, by dotted name.

    A group gives all its fields but places and labels; a field that is named itself is always taken.
    """
    subtree: dict[str, Any] = {}
    for key in keys:
        group, _, name = key.partition(".")
        if name:
            subtree[key] = values[group][name]
            continue
        fields = {f"{group}.{field}": value for field, value in values[group].items()}
        subtree |= {
            field: value
            for field, value in fields.items()
            if field not in NOT_IN_FINGERPRINT | NOT_IN_GROUP
            and (value or field not in NOT_IN_FINGERPRINT_IF_EMPTY)
        }
    return subtree


def input_revisions(config: Config, target: ModelRef) -> dict[str, str]:
    """Content hashes of what the configuration only points at, by its group."""
    revisions = {"target": target.revision}
    if config.draft.path is not None:
        revisions["draft"] = content_revision(obtain_model(config.draft.path, field="draft.path"))
    sources = sources_revision(config.corpus)
    if sources is not None:
        revisions["corpus"] = sources
    for group, named in (("eval", config.eval.prompts), ("bench", config.bench.prompts)):
        if named is not None:
            revisions[group] = file_revision(Path(named)) if Path(named).is_file() else named
    if config.bench.medusa_heads is not None:
        heads = heads_revision(Path(config.bench.medusa_heads))
        revisions["bench"] = fingerprint_of({"prompts": revisions.get("bench"), "medusa_heads": heads})
    return revisions


def heads_revision(folder: Path) -> str:
    """sha256 of Medusa heads. Raises ValueError where there are none."""
    paths = [folder / name for name in (HEADS_CONFIG, HEADS_WEIGHTS)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"bench.medusa_heads={str(folder)!r}: no Medusa heads there (it lacks {', '.join(missing)}); "
            "`make distill EXPERIMENT=smollm2_medusa` leaves some in artifacts/latest/distill/draft"
        )
    return fingerprint_of({path.name: file_revision(path) for path in paths})


def stage_fingerprint(
    stage: Stage, values: dict[str, Any], revisions: dict[str, str], upstream: dict[str, str]
) -> str:
    """sha256 of the stage's name, version, settings, the content it points at, and its upstream fingerprints."""
    groups = {key for key in stage.config_keys if "." not in key}
    return fingerprint_of(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": config_subtree(values, stage.keys_read(values)),
            "upstream": {name: upstream[name] for name in stage.upstream},
            "revisions": {group: revision for group, revision in revisions.items() if group in groups},
        }
    )


def stage_fingerprints(config: Config, revisions: dict[str, str]) -> dict[str, str]:
    """The fingerprint of every stage under this configuration, by name; `revisions` as of `input_revisions`."""
    values, fingerprints = asdict(config), dict[str, str]()
    for stage in STAGES:
        fingerprints[stage.name] = stage_fingerprint(stage, values, revisions, fingerprints)
    return fingerprints
