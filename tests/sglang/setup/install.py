"""How does a stock SGLang get into an environment of its own, for a CPU? Each step does only what is missing.

usage: python -m tests.sglang.setup.install VENV

None of SGLang's files is changed. Its package asks for builds of torch and kernels for CUDA: so it comes without its
requirements, and what it imports at its start is named here. What remains is in ``stand_ins``, which `SERVER_ENV` puts
into the path.
"""

import sys
from pathlib import Path

from tests.engine_venv import NIXL, NIXL_FILE, NIXL_PACKAGES, NIXL_THREAD, NO_PACKAGE, EngineVenv, Failed, main

SGLANG = "0.5.23"
ROOM = 4 << 30
"""Bytes of disk that the installation takes for a while."""
REQUIRED = (
    *("torch==2.13.0+cpu", "transformers==5.19.0", "tokenizers==0.23.2", "compressed-tensors==0.18.0"),
    *("aiohttp", "fastapi", "uvicorn>=0.51", "uvloop", "pydantic", "python-multipart", "requests", "openai==2.8.0"),
    *("msgspec", "orjson", "pybase64", "pyzmq>=25.1.2", "prometheus-client>=0.20.0", "opentelemetry-api"),
    *("numpy", "scipy", "einops", "dill", "distro", "gguf", "lxml", "pillow", "regex", "partial_json_parser"),
    *("mistral_common>=1.11.5", "sentencepiece==0.2.1", "tiktoken", "soundfile==0.13.1", "nvidia-ml-py"),
    *("IPython", "loguru", "packaging", "psutil", "setproctitle", "watchfiles"),
)
ALONE = (f"sglang=={SGLANG}", "xgrammar==0.2.7", "apache-tvm-ffi==0.1.11", "triton", *NIXL_PACKAGES)
"""Come without their requirements. Of triton only names are used."""
STAND_INS = Path(__file__).with_name("stand_ins")
SERVER_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(STAND_INS),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "UCX_TLS": "tcp",  # an idle pair that shares memory loses its link, and SGLang never makes it anew
    "UCX_KEEPALIVE_INTERVAL": "inf",
}
"""What a server needs to run on two cores without a network."""


def install(folder: Path) -> None:
    """Bring an environment to the state that the tests need.

    Raises:
        Failed: there is no Python 3.11, or a package can't be had.
    """
    venv = EngineVenv(folder, "test-sglang")
    found = venv.versions()
    if found.get("sglang") != SGLANG or found.get("nixl") != NIXL:
        venv.room(ROOM)
        print(f"== installing sglang {SGLANG}: about two minutes", flush=True)
        if venv.pip("install", "--no-compile", "--prefer-binary", *REQUIRED) or venv.pip(
            "install", "--no-compile", "--no-deps", *ALONE
        ):
            raise Failed(NO_PACKAGE.format(package=f"sglang {SGLANG}", venv=folder))
    venv.patch({NIXL_FILE: NIXL_THREAD})


if __name__ == "__main__":
    raise SystemExit(main(install, sys.argv[1:]))
