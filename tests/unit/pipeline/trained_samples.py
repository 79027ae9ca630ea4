"""A tiny configuration whose corpus and distill stages are finished, without running them through the entry point."""

import json
from pathlib import Path

from distill.draft_init import draft_from_layers
from pipeline.context import StageContext
from pipeline.corpus.stage import run_corpus
from pipeline.models import load_causal_lm, resolve_target
from pipeline.schema import Config
from pipeline.stages import input_revisions, stage_fingerprints
from pipeline.store import StageRecord, Store
from pipeline.tracker import Tracker


def finish_stages(config: Config) -> dict[str, Path]:
    """Run the corpus stage, put two drafts of the target's layers where distill would, and mark both as finished."""
    target = resolve_target(config)
    store, folders = Store(Path(config.artifacts_dir)), {}
    fingerprints = stage_fingerprints(config, input_revisions(config, target))
    for name in ("corpus", "distill"):
        work_dir = store.work_dir(name, fingerprints[name])
        work_dir.mkdir(parents=True, exist_ok=True)
        if name == "corpus":
            run_corpus(StageContext(config, work_dir, {}, Tracker(), target))
        else:
            model = load_causal_lm(target.path, "float32")
            for folder, layers in (("undistilled", [0]), ("draft", [0, 1, 2])):
                draft_from_layers(model, layers).save_pretrained(work_dir / folder)
            (work_dir / "train.json").write_text(json.dumps({"vocab_shortlist": None}))
        record = StageRecord(name, 1, fingerprints[name], {}, {}, {}, 0.0, False, {}, None)
        folders[name] = store.finish(record)
    return folders
