"""Plans well-known models on three GPUs: configs of examples/recipes, and the table of docs/guides/recipes.md.

usage: python bench/recipes.py [--out examples/recipes] [--docs docs/guides/recipes.md] [--only MODEL-GPU]

Each recipe is what one `penstock plan` writes, with that command above it. Nothing is measured: the same command writes
the same bytes. All of them take three minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from penstock_lab.report.markdown import write_part

MODELS = (
    *("Llama-3.1-8B-Instruct", "Llama-3.3-70B-Instruct", "Mistral-Small-24B-Instruct-2501", "gemma-3-27b-it"),
    *("Qwen3-32B", "Qwen3-30B-A3B-Instruct-2507", "Qwen3-235B-A22B-Instruct-2507", "gpt-oss-120b"),
)
GPUS = {"a100": "A100 80 GB", "h100": "H100 SXM", "h200": "H200"}
TRAFFIC = "--rate 4 --isl 2000 --osl 250 --ttft 1s --itl 50ms"
"""The same for all, so that GPUs and models can be compared; each of them keeps the SLO at some size."""
REQUESTS = 300
"""Simulated to verify a plan: enough for a p95, and a recipe takes seconds."""
HEAD = (
    "# {model} on {gpu}, simulated. With real engines: the same command with --engine vllm.\n#   penstock up {path}\n"
)


class Recipe(NamedTuple):
    """One model on one kind of GPU."""

    model: str
    gpu: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.gpu}".lower()

    @property
    def file(self) -> str:
        return f"{self.name}.yaml"

    @property
    def command(self) -> str:
        return f"penstock plan --model {self.model} --gpu {self.gpu} {TRAFFIC} --requests {REQUESTS}"

    def made(self) -> tuple[str, dict[str, Any]]:
        """Return the config's text, and the deployment as `penstock plan` describes it."""
        with tempfile.TemporaryDirectory() as folder:
            words = [*self.command.split()[1:], "--output", folder]
            subprocess.run([sys.executable, "-m", "penstock", *words], check=True, stdout=subprocess.DEVNULL)
            config = Path(folder, "penstock.yaml").read_text()
            best = json.loads(Path(folder, "plan.json").read_text())["deployments"][0]
        head = HEAD.format(model=self.model, gpu=GPUS[self.gpu], path=f"examples/recipes/{self.file}")
        return f"{head}#   {self.command}\n{config}", best


RECIPES = [Recipe(model, gpu) for model in MODELS for gpu in GPUS]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("examples/recipes"))
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--only", metavar="MODEL-GPU", help="the name of one recipe; the page stays as it is")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    made = {}
    for recipe in RECIPES:
        if options.only in (None, recipe.name):
            text, made[recipe] = recipe.made()
            (options.out / recipe.file).write_text(text)
            print(recipe.file, made[recipe]["label"], sep=": ", flush=True)
    if not made:
        parser.error(f"no recipe {options.only}: there are {', '.join(recipe.name for recipe in RECIPES)}")
    if options.only is None:
        for path in {*options.out.glob("*.yaml")} - {options.out / recipe.file for recipe in RECIPES}:
            path.unlink()
        if options.docs is not None:
            write_part(options.docs, tables(made))
    return 0


def tables(made: dict[Recipe, dict[str, Any]]) -> str:
    """Return the short table of all recipes, and the long one that becomes CSV."""
    short = [f"| Model | {' | '.join(GPUS.values())} |", "| --- |" + " --- |" * len(GPUS)]
    for model in MODELS:
        cells = [cell(recipe, deployment) for recipe, deployment in made.items() if recipe.model == model]
        short.append(f"| {model} | {' | '.join(cells)} |")
    names = ("config", "GPU", "deployment", "GPUs", "$/h", "$/M out", "% in SLO", "TTFT p95 ms", "ITL p95 ms")
    long = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    long += [f"| {' | '.join(row(recipe, deployment))} |" for recipe, deployment in made.items()]
    return "\n".join([*short, "", "### All recipes", "", *long])


def cell(recipe: Recipe, deployment: dict[str, Any]) -> str:
    """Return replicas and their tensor parallelism, as a link to the config, and dollars per million answer tokens."""
    pools = "+".join(pool_of(pool) for pool in deployment["pools"])
    price = deployment["price_per_million_answer_tokens"]
    return f"[{pools}](../../examples/recipes/{recipe.file}) ${price:.2f}"


def pool_of(pool: dict[str, Any]) -> str:
    role = {"prefill": "P", "decode": "D"}.get(pool["role"], "")
    return f"{pool['replicas']}{role}×TP{pool['gpus']}"


def row(recipe: Recipe, deployment: dict[str, Any]) -> tuple[str, ...]:
    return (
        recipe.file,
        recipe.gpu,
        deployment["label"],
        str(deployment["gpus"]),
        f"{deployment['price_per_hour']:.2f}",
        f"{deployment['price_per_million_answer_tokens']:.3f}",
        f"{100 * deployment['simulated_attainment']:.1f}",
        f"{1e3 * deployment['ttft_s']['p95']:.0f}",
        f"{1e3 * deployment['itl_mean_s']['p95']:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
