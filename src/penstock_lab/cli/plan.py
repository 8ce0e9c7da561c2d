"""Command ``penstock plan``: the cheapest deployments of a model that meet an SLO, verified in simulation."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.shared.option_values import SECONDS, Amount
from penstock.cli.shared.output import fitted, json_option, table, terminal_width, text_width, wrapped

if TYPE_CHECKING:
    from penstock_lab.profiler.deployment_plan.plan_run import PlanOutcome

EPILOG = """\b
Examples:
  penstock plan --model Qwen3-8B --gpu h200 --ttft 500ms --itl 20ms --rate 50 --isl 3000 --osl 300
  penstock plan --model ./config.json --gpu h200 --gpu h100 --price h200=3.1 --trace trace.jsonl --output plan
  penstock plan --model Qwen3-32B --gpu h100 --profile h100:2=profiles/qwen --rate 5 --isl 4k --osl 500 --engine vllm
  penstock plan intent.yaml --apply

INTENT is a YAML file of model, engine, hardware, slo and workload, or a DynamoGraphDeploymentRequest; flags win.
Exit status 1: no deployment meets the SLO, and the answer names the floor that it hits.
"""


@click.command("plan", epilog=EPILOG, short_help="Find the cheapest deployments that meet an SLO.")
@click.argument(
    "intent", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[INTENT]"
)
@click.option("--model", help="A model's config.json, its folder, or a well-known name with or without its owner.")
@click.option("--engine", type=click.Choice(["sim", "vllm", "sglang"]), help="What the config starts.  [default: sim]")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    help="GPU that may be used, or its YAML file; repeated: pools may differ.  [default: this machine's]",
)
@click.option("--price", "prices", multiple=True, metavar="GPU=DOLLARS", help="Price of one GPU per hour; repeated.")
@click.option("--max-gpus", type=click.IntRange(1), help="Most GPUs of a deployment.")
@click.option("--ttft", type=SECONDS, help="Target of the time to first token, such as 500ms.")
@click.option(
    "--itl", type=SECONDS, help="Target of a request's mean gap between tokens, such as 20ms; none for embedders."
)
@click.option("--attainment", type=Amount("ratio"), help="Share of requests that must keep both.  [default: 95%]")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="File of requests to plan for.")
@click.option("--rate", type=Amount("1/s"), help="Requests per second; with --trace, instead of its own.")
@click.option("--isl", "prompt", metavar="LENGTHS", help="Prompt tokens, such as 3000 or lognormal:median=800.")
@click.option("--osl", "answer", metavar="LENGTHS", help="Output tokens, in the same way.")
@click.option("--requests", type=click.IntRange(2), help="Simulate only so many requests.")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="[GPU[:TP]=]FOLDER",
    help="Measured profile of that engine, of size 1 if neither says it, or measure to take one first; repeated.",
)
@click.option("--verify", type=click.IntRange(1), help="Deployments that are simulated.  [default: 3]")
@click.option("--seed", type=int, help="Same seed, same requests.  [default: 0]")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for configs and plan.json.")
@click.option("--apply/--no-apply", "apply", default=None, help="Start the best deployment when it is planned.")
@click.option("--jobs", type=click.IntRange(1), help="Simulations at once; unset is one for each core.")
@json_option
def command(
    as_json: bool,
    intent: Path | None,
    prices: tuple[str, ...],
    profiles: tuple[str, ...],
    output: Path | None,
    apply: bool | None,
    jobs: int | None,
    **flags: Any,
) -> int:
    """Plan deployments of a model: engines, parallelism and replicas, aggregated or with prefill and decode apart."""
    import msgspec

    from penstock_lab.profiler.deployment_plan.intent_file import read_intent
    from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest, numbers_by_key, profiles_by_key
    from penstock_lab.profiler.deployment_plan.plan_run import SPARE, headings, outcome_json, plan, rows, sentences
    from penstock_lab.report.outcome import json_text

    asked = None if intent is None else read_intent(intent)
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    ttft, itl = given.pop("ttft", None), given.pop("itl", None)
    if prices:
        given["prices"] = numbers_by_key(prices, "--price")
    if profiles:
        given["profiles"] = profiles_by_key(profiles)
    base = PlanRequest() if asked is None else asked.request
    request = msgspec.structs.replace(base, slo=base.slo.otherwise(ttft, itl), **given)
    if asked is not None:
        output, apply = output or asked.output, asked.apply if apply is None else apply
    if apply and request.engine == "sglang":
        raise click.UsageError("SGLang's servers are not started here: leave --apply out, and render a compose file")
    if apply and output is None:
        output = Path("plan")
    outcome = plan(request, output=output, jobs=jobs)
    if as_json:
        click.echo(json_text(outcome_json(outcome)), nl=False)
    else:
        _print_plan(
            request.name,
            outcome,
            fitted(headings(outcome), rows(outcome), text_width(False), SPARE),
            sentences(outcome),
        )
    if not outcome.feasible:
        return 1
    if not apply:
        return 0
    from penstock.cli.shared.cluster_run import run_cluster
    from penstock.cli.shared.settings_flags import load_to_start

    return run_cluster(load_to_start(outcome.config, ()), "up")


def _print_plan(name: str, outcome: "PlanOutcome", shown: tuple[list[str], list[list[Any]]], lines: list[str]) -> None:
    (ttft, itl), share = outcome.request.slo.planned, outcome.request.attainment
    answers = outcome.request.answers
    tokens = f"{outcome.prompt:,.0f} + {outcome.answer:,.0f}" if answers else f"{outcome.prompt:,.0f}"
    targets = f"TTFT {1e3 * ttft:,.0f} ms" + (f" and ITL {1e3 * itl:,.0f} ms" if answers else "")
    click.echo(f"{name}: {outcome.rate:,.2f} requests/s of {tokens} tokens; {targets} for {share:.0%} of them")
    if shown[1]:
        click.echo(table(*shown))
    for line in lines:
        click.echo(wrapped(line, max(80, terminal_width())))
