"""Does vLLM take these command lines? It makes an engine's config of each, as `vllm serve` does at its start.

usage: VENV/bin/python accepts.py < LINES > ANSWERS      with the Python of vLLM's environment

In and out are JSON: lists of words behind ``vllm serve``, and for each what vLLM refuses it for, or null.
"""

import json
import sys


def refusal(words: list[str]) -> str | None:
    """Return why an engine would not start with these words; None where it would."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        given.model = given.model_tag or given.model
        AsyncEngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever ends a server at its start is the answer
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    lines = json.load(sys.stdin)
    answers = [refusal(words) for words in lines]
    print(json.dumps(answers))
