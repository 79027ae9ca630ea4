"""`vllm serve` with a target and its draft on loopback: chat requests, the same text as plain serving, and `/metrics`.

`DRAFTSMITH_EXPORT=artifacts make test-vllm` runs the last test on the draft of a finished run, too.
"""

import json
import os
from pathlib import Path

import pytest

from pipeline.serving_files import write_serving_files
from pipeline.serving_inputs import ServedPair, held_out_prompts, read_pair
from pipeline.vllm_server import VLLMServer, vllm_command
from specdec_runtime.backends.vllm_cpu import is_cpu_build
from tests.integration.vllm_models import save, tiny_llama

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

QUESTIONS = ["w5 w6 w7", "w90 w11", "w3 w4 w5 w6 w7 w8 w9", "w44"]


def chat_texts(server: VLLMServer, questions: list[str], **parameters: object) -> list[str]:
    texts = []
    for question in questions:
        answer = server.chat([{"role": "user", "content": question}], temperature=0, **parameters)
        texts.append(answer["choices"][0]["message"]["content"])
    return texts


def test_chat_with_a_draft_is_plain_chat(tmp_path: Path) -> None:
    """fp32: the same text to the character, and the server's counters say that the draft was at work."""
    target = save(tmp_path / "target", tiny_llama(seed=0, num_layers=2))
    draft = save(tmp_path / "draft", tiny_llama(seed=0, num_layers=2, noise=0.01))
    words = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
    with VLLMServer(target, log=tmp_path / "plain.log", arguments=words) as server:
        plain = chat_texts(server, QUESTIONS, max_tokens=40)
        assert server.speculation().num_rounds == 0
    pair = ServedPair(
        str(target), draft, num_speculative_tokens=3, sampler="greedy", dtype="float32", report={}
    )
    config = pair.speculative_config()
    with VLLMServer(target, log=tmp_path / "draft.log", arguments=words, speculative_config=config) as server:
        before = server.speculation()
        assert chat_texts(server, QUESTIONS, max_tokens=40) == plain
        after = server.speculation()
    num_rounds = after.num_rounds - before.num_rounds
    assert num_rounds > 0
    assert after.num_proposed - before.num_proposed == 3 * num_rounds
    assert 0.2 < (after.num_accepted - before.num_accepted) / (3 * num_rounds) < 1
    assert len(after.accepted_per_position) == 3
    assert after.accepted_per_position == sorted(after.accepted_per_position, reverse=True)


def test_serve_sh_starts_as_it_is_exported(tmp_path: Path) -> None:
    """From another folder, with nothing set: on a CPU build it brings vLLM's OpenMP, and the draft is at work."""
    target = save(tmp_path / "target", tiny_llama(seed=0, num_layers=2))
    export = tmp_path / "export"
    save(export / "draft", tiny_llama(seed=0, num_layers=2, noise=0.01))
    write_serving_files(
        export, target=str(target), gamma=3, draft_sample_method="probabilistic", dtype="float32"
    )
    words = ["--dtype", "float32", "--enforce-eager"]
    server = VLLMServer(target, log=tmp_path / "serve.log", arguments=words)
    server.command = [str(export / "serve.sh"), *server.command[server.command.index("--host") :]]
    unset = ("LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND")
    server.environment = {name: value for name, value in os.environ.items() if name not in unset}
    server.environment |= {"VLLM": vllm_command(), "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with server:
        for temperature in (0, 1):
            message = {"role": "user", "content": QUESTIONS[0]}
            answer = server.chat([message], max_tokens=24, temperature=temperature, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 24
        stats = server.speculation()
        assert stats.num_proposed == 3 * stats.num_rounds > 0 and stats.num_accepted > 0
        assert server._process is not None
        given = Path(f"/proc/{server._process.pid}/environ").read_text()
    assert ("libiomp5.so" in given) is is_cpu_build()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The end of its log is in the error, and no process is left behind."""
    server = VLLMServer(tmp_path / "no such model", log=tmp_path / "server.log")
    with pytest.raises(RuntimeError, match="did not come up"), server:
        pass
    assert server._process is not None and server._process.poll() is not None


@pytest.mark.skipif(
    "DRAFTSMITH_EXPORT" not in os.environ, reason="DRAFTSMITH_EXPORT names no artifacts folder"
)
def test_the_exported_draft_serves(tmp_path: Path) -> None:
    """The real pair, bf16: most greedy outputs equal plain serving's, and about as much is accepted as the report says."""
    artifacts = Path(os.environ["DRAFTSMITH_EXPORT"])
    pair = read_pair(artifacts)
    prompts = held_out_prompts(artifacts, 12, max_tokens=256)
    words = ["--dtype", pair.dtype, "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "512"]

    def texts(server: VLLMServer) -> list[str]:
        answers = [server.complete(prompt, temperature=0, max_tokens=48) for prompt in prompts]
        return [answer["choices"][0]["text"] for answer in answers]

    with VLLMServer(pair.target, log=tmp_path / "plain.log", arguments=words) as server:
        plain = texts(server)
    config = json.loads((artifacts / "latest" / "export" / "speculative_config.json").read_text())
    config["model"] = str(pair.draft)
    with VLLMServer(
        pair.target, log=tmp_path / "draft.log", arguments=words, speculative_config=config
    ) as server:
        drafted = texts(server)
        stats = server.speculation()
    assert sum(a == b for a, b in zip(plain, drafted, strict=True)) >= len(prompts) // 2
    [promised] = [
        row["value"]
        for row in pair.report["acceptance_rate"]
        if (row["draft"], row["temperature"], row["sampler"]) == ("distilled", 0.0, pair.sampler)
    ]
    # The first proposal of a round is what acceptance_rate is about; 12 outputs give it to some points.
    assert abs(stats.accepted_per_position[0] / stats.num_rounds - promised) < 0.1
