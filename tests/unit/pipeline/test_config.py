"""Every configuration composes, says what it is in comments, and refuses what it does not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from distill.config import LOSS_NAMES
from pipeline.config import conf_dir, to_config
from pipeline.schema import Config
from tests.conftest import ROOT, Composer

GROUPS = ("target", "draft", "corpus", "loss", "train", "eval", "bench", "runtime", "tracking")
#: What has to be said beside an option that needs a place.
NEEDED = {
    "target=hf": "target.path=some/model",
    "draft=pretrained": "draft.path=some/model",
    "draft=narrowed": "draft.hidden_size=384",
    "draft=medusa": "stages=[corpus,distill,eval,bench]",
    "corpus=prompts": "corpus.prompts=some.jsonl",
    "loss=mix": "loss.weights={tv: 0.9, cross_entropy: 0.1}",
}


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(make_config: Composer, experiment: str) -> None:
    config = make_config(f"+experiment={experiment}")
    assert isinstance(config, Config)
    assert max(config.bench.gammas) <= config.preflight.max_gamma


def test_settings_are_read_without_the_libraries_of_models() -> None:
    """`--help` and a mistyped setting are answered at once, not after torch and Transformers are loaded."""
    code = (
        "import sys, pipeline.__main__\n"
        "from pipeline.commands import compose_config\n"
        "compose_config(['+experiment=smollm2_cpu'])\n"
        "print({'torch', 'transformers', 'datasets', 'mlflow', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("choice", [f"{group}={option}" for group in GROUPS for option in options(group)])
def test_every_option_composes(make_config: Composer, choice: str) -> None:
    config = make_config(choice, *([NEEDED[choice]] if choice in NEEDED else []))
    assert isinstance(config, Config)


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_sets_every_field_and_no_other(group: str) -> None:
    """A field that is missing in the YAML has no comment that says what it does."""
    schema = OmegaConf.structured(Config)[group]
    for option in options(group):
        assert set(OmegaConf.load(conf_dir() / group / f"{option}.yaml")) == set(schema), option


def test_root_defaults_equal_the_dataclasses(make_config: Composer) -> None:
    """Two sources of defaults would drift apart."""
    assert make_config() == Config()


@pytest.mark.parametrize(
    "file", sorted(conf_dir().rglob("*.yaml")), ids=lambda file: str(file.relative_to(conf_dir()))
)
def test_every_field_has_a_comment_above_it(file: Path) -> None:
    previous = ""
    for line in file.read_text().split("\nhydra:")[0].splitlines():
        is_field = re.match(r"\s*\w+: *\S", line) and not line.lstrip().startswith(("- ", "#"))
        if is_field:
            assert previous.lstrip().startswith("#"), f"{file.name}: no comment above {line.strip()!r}"
        previous = line


def test_one_option_for_every_loss(make_config: Composer) -> None:
    for name in LOSS_NAMES:
        assert make_config(f"loss={name}").loss.weights == {name: 1.0}


def test_losses_mix(make_config: Composer) -> None:
    assert make_config("loss=mix", "loss.weights={tv: 0.9, cross_entropy: 0.1}").loss.weights == {
        "tv": 0.9,
        "cross_entropy": 0.1,
    }


def test_one_seed_for_all(make_config: Composer) -> None:
    config = make_config("seed=7", "bench.seed=1")
    assert (config.corpus.seed, config.train.seed, config.eval.seed, config.bench.seed) == (7, 7, 7, 1)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("corpus.num_promts=3", "num_promts"),
        ("corpus.num_prompts=many", "corpus.num_prompts"),
        ("loss=nothing", "loss/nothing"),
        ("+experiment=nothing", "experiment/nothing"),
    ],
)
def test_hydra_refuses_by_name(make_config: Composer, override: str, name: str) -> None:
    with pytest.raises(Exception, match=name) as caught:
        make_config(override)
    assert (
        isinstance(caught.value, ConfigCompositionException) or "MissingConfig" in type(caught.value).__name__
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+corpus.num_promts=3"], "corpus.num_promts: no such setting"),
        (["+nothing=3"], "nothing: no such setting"),
        (["target=hf"], "target.path has no value"),
        (["draft=pretrained"], "draft.path has no value"),
        (["corpus=prompts"], "corpus.prompts has no value"),
        (["stages=[corpus,train]"], r"unknown \['train'\]"),
        (["stages=[]"], "choose from"),
        (["target=random_tiny", "target.path=some/model"], "choose one target"),
        (["loss=mix"], "loss.weights"),
        (["loss=mix", "loss.weights={kl: 1.0}"], "kl"),
        (["train.max_steps=0"], "train.max_steps=0"),
        (["gate.min_speedup=1.1", "stages=[distill,eval,bench]"], "gate.min_speedup=1.1 is held against the report"),
        (["seed=-1"], "seed=-1: choose one from 0"),
        (["train.seed=4294967296"], "seed=4294967296: choose one from 0"),
        (["target.revision=main"], "target.revision=main: only a Hugging Face id"),
        (["corpus.prompts_column=text"], "corpus.prompts_column='text' is about corpus.prompts"),
        (["corpus.topk=0"], "corpus.topk=0 stores none of the target's probabilities"),
        (["train.weight_decay=-1"], "train.weight_decay=-1"),
        (["train.adam_beta2=1"], "train.adam_beta2=1"),
        (["loss.lk_eta=-1"], "loss.lk_eta=-1"),
        (["eval.num_bootstrap=0"], "eval.num_bootstrap=0"),
        (["eval.max_prompts=0"], "eval.max_prompts=0"),
        (["eval.warpers=[{top_p: 0}]"], "eval.warpers: .*top_p=0"),
        (["bench.num_bootstrap=0"], "bench.num_bootstrap=0"),
        (["preflight.max_gamma=0"], "preflight.max_gamma=0"),
        (["preflight.context_tokens=1"], "preflight.context_tokens=1: must be at least 2"),
        (["tracking.timeout_s=0"], "tracking.timeout_s=0"),
        (["train.learning_rate=nan"], "train.learning_rate=nan: give a finite number"),
        (["loss.weights={tv: inf}", "loss=mix"], "loss.weights.tv=inf"),
        (["eval.temperatures=[0, nan]"], "eval.temperatures=nan"),
        (["draft.num_layers=0"], "draft.num_layers=0"),
        (["draft=medusa"], "preflight is for draft models"),
        (["+experiment=tiny_medusa", "stages=[corpus,distill,eval,bench,export]"], "export is for draft models"),
        (["+experiment=tiny_medusa", "bench.gammas=[3]"], "draft.num_heads=2 propose no more"),
        (["+experiment=tiny_medusa", "bench.auto_gamma=true"], "bench.auto_gamma=true"),
        (["+experiment=tiny_medusa", "corpus.max_new_tokens=2"], "corpus.max_new_tokens=2: with draft.num_heads=2"),
        (["+experiment=tiny_medusa", "bench.backends=[native,hf_assisted]"], "cannot serve Medusa heads"),
        (["+experiment=tiny_medusa", "draft.num_heads=null"], "draft.num_heads=None"),
        (["draft.num_heads=2"], "draft.num_heads=2"),
        (["+experiment=tiny_medusa", "launch.engine=ddp"], "launch.engine=ddp: Medusa heads"),
        (["+experiment=tiny_medusa", "draft.vocab_shortlist=auto"], "draft.vocab_shortlist=auto: is for draft models"),
        (["+experiment=tiny_medusa", "bench.trees=[2x1x1]"], "draft.num_heads=2 propose no more"),
        (["bench.trees=[bush3]"], "bush3"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    make_config: Composer, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(*overrides)


def test_without_stored_probabilities_there_is_still_a_loss_to_train_with(make_config: Composer) -> None:
    for more in (["loss=cross_entropy"], ["loss.teacher=online"], ["stages=[corpus]"]):
        assert make_config("corpus.topk=0", *more).corpus.topk == 0


def test_another_target_is_not_called_by_the_embedded_ones_name(make_config: Composer) -> None:
    assert make_config("target=hf", "target.path=some/Model-1B").target.name == "Model-1B"
    assert make_config("target=hf", "target.path=some/Model-1B", "target.name=mine").target.name == "mine"


def test_schema_alone_is_a_valid_configuration() -> None:
    assert to_config(OmegaConf.structured(Config)) == Config()
