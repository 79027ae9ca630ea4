"""The engines that can answer a corpus's prompts; `open_backend` makes the one that the configuration names."""

import os

from pipeline.context import StageContext
from pipeline.corpus.backends.base import CorpusBackend
from pipeline.corpus.backends.http import RetryPolicy, Servers
from pipeline.corpus.backends.native import NativeCorpusBackend
from pipeline.corpus.backends.openai import OpenAICorpusBackend
from pipeline.corpus.backends.ray import RayCorpusBackend
from pipeline.corpus.backends.ray_actor import engine_spec
from pipeline.corpus.backends.vllm import VllmCorpusBackend
from pipeline.corpus.rescore import RescoringBackend
from pipeline.corpus.target_info import TargetInfo
from pipeline.models import ModelRef, load_causal_lm
from pipeline.schema import Config

__all__ = ["CorpusBackend", "open_backend", "open_engine"]


def open_backend(context: StageContext, target: TargetInfo) -> CorpusBackend:
    """The engine of `corpus.backend`; with `corpus.rescore` the candidates are computed here instead.

    Raises:
        ValueError: it is not installed, does not answer, or cannot give what the corpus needs.
    """
    corpus, ref = context.config.corpus, context.target
    backend = open_engine(context.config, ref, target)
    if not corpus.rescore:
        return backend
    model = load_causal_lm(ref.path, context.config.target.dtype, ref.trust_remote_code)
    return RescoringBackend(backend, model, batch_size=corpus.batch_size)


def open_engine(config: Config, ref: ModelRef, target: TargetInfo) -> CorpusBackend:
    """The engine alone.

    Raises:
        ValueError: as `open_backend`.
    """
    corpus = config.corpus
    if corpus.backend == "ray":
        return RayCorpusBackend(
            engine_spec(config, ref),
            address=corpus.ray_address,
            num_actors=corpus.ray_num_actors,
            cpus_per_actor=corpus.ray_cpus_per_actor,
            gpus_per_actor=corpus.ray_gpus_per_actor,
            max_retries=corpus.max_retries,
        )
    if corpus.backend == "openai":
        policy = RetryPolicy(corpus.max_retries, corpus.request_timeout_s)
        servers = Servers(
            corpus.base_urls,
            policy,
            num_connections=corpus.num_in_flight,
            api_key=os.environ.get("OPENAI_API_KEY"),
        )
        return OpenAICorpusBackend(
            servers,
            served_model=corpus.served_model,
            num_in_flight=corpus.num_in_flight,
            extra=dict(corpus.engine_args),
        )
    max_length = corpus.max_prompt_tokens + max(corpus.max_new_tokens, corpus.max_question_tokens)
    max_length = min(max_length, target.context_tokens or max_length)
    if corpus.backend == "vllm":
        return VllmCorpusBackend(
            ref.path,
            dtype=config.target.dtype,
            batch_size=corpus.batch_size,
            max_length=max_length,
            vocab_size=target.vocab_size,
            topk=0 if corpus.rescore else corpus.topk,
            trust_remote_code=ref.trust_remote_code,
            engine_args=dict(corpus.engine_args),
        )
    assert corpus.backend == "native"
    model = load_causal_lm(ref.path, config.target.dtype, ref.trust_remote_code)
    return NativeCorpusBackend(model, batch_size=corpus.batch_size, max_length=max_length)
