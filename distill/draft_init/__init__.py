"""Where a draft comes from: layers of the target, a narrower copy of them, or chance; and the shortlist of its head."""

from distill.draft_init.chosen import ChosenLayers, candidate_layers, choose_layers
from distill.draft_init.layers import draft_from_layers, select_layers
from distill.draft_init.random import random_draft
from distill.draft_init.shortlist import frequent_token_ids, rank_token_ids, shortlist_coverage
from distill.draft_init.sizes import check_narrower, num_parameters, sized_config
from distill.draft_init.width import narrow_draft

__all__ = [
    "ChosenLayers",
    "candidate_layers",
    "check_narrower",
    "choose_layers",
    "draft_from_layers",
    "frequent_token_ids",
    "narrow_draft",
    "num_parameters",
    "random_draft",
    "rank_token_ids",
    "select_layers",
    "shortlist_coverage",
    "sized_config",
]
