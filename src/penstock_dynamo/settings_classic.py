"""Knobs of Dynamo's older planner policies, each under its Dynamo name in snake case."""

from typing import TYPE_CHECKING, Annotated, TypeAlias

from penstock import extension
from penstock.kernel.settings import Knob, Settings

if TYPE_CHECKING:
    PredictorName: TypeAlias = str
else:
    PredictorName = extension.choices("predictor")


class LoadClassicSettings(Settings, frozen=True, kw_only=True):
    """Policy load-classic: thresholds on the prefill queue and on KV use, one replica at a time."""

    adjustment_interval: Annotated[
        float, Knob("Seconds between two decisions; longer is steadier and later.", unit="s", gt=0)
    ] = 30.0
    metric_pulling_interval: Annotated[
        float,
        Knob(
            "Seconds between two samples of queue and KV use; longer asks engines less often, and sees less.",
            unit="s",
            gt=0,
        ),
    ] = 1.0
    decode_kv_scale_up_threshold: Annotated[
        float, Knob("Mean KV use above which a decode worker is added.", unit="ratio", ge=0)
    ] = 0.9
    decode_kv_scale_down_threshold: Annotated[
        float, Knob("Mean KV use below which one is taken away.", unit="ratio", ge=0)
    ] = 0.5
    prefill_queue_scale_up_threshold: Annotated[
        float, Knob("Mean number of requests that wait for prefill above which a prefill worker is added.", ge=0)
    ] = 0.5
    prefill_queue_scale_down_threshold: Annotated[float, Knob("The same below which one is taken away.", ge=0)] = 0.2


class SlaClassicSettings(Settings, frozen=True, kw_only=True):
    """Policy sla-classic: interpolated profiles, corrected by what is observed. Disaggregated pools only."""

    adjustment_interval: Annotated[
        float, Knob("Seconds between two decisions; it should be longer than a start-up.", unit="s", gt=0)
    ] = 180.0
    no_correction: Annotated[
        bool, Knob("Trust the profile: do not correct it by observed TTFT and ITL. For long start-ups and cold caches.")
    ] = False
    load_prediction_window_size: Annotated[
        int,
        Knob(
            "Intervals that arima and prophet are fitted to, in every policy: fewer forget the past sooner, "
            "more see longer patterns and take longer.",
            unit="count",
            ge=2,
        ),
    ] = 50


class ThresholdSettings(Settings, frozen=True, kw_only=True):
    """Optimisation target load: fixed thresholds, all four of them."""

    prefill_scale_up_queue_tokens: Annotated[
        int | None,
        Knob("Prompt tokens that wait in any prefill engine from which on one is added.", unit="tokens", ge=0),
    ] = None
    prefill_scale_down_queue_tokens: Annotated[
        int | None, Knob("The same in every one up to which one is taken away.", unit="tokens", ge=0)
    ] = None
    decode_scale_up_kv_rate: Annotated[
        float | None, Knob("KV use of any decode engine from which on one is added.", unit="ratio", ge=0, le=1)
    ] = None
    decode_scale_down_kv_rate: Annotated[
        float | None, Knob("The same of every one up to which one is taken away.", unit="ratio", ge=0, le=1)
    ] = None


class FpmSettings(Settings, frozen=True, kw_only=True):
    """Policies over forward passes: throughput-fpm, load-fpm, load-fpm-1.6 and hybrid."""

    load_scaling_down_sensitivity: Annotated[
        float,
        Knob(
            "Share of the service level under which an estimate must lie to give a replica back.",
            unit="ratio",
            ge=0,
            le=1,
        ),
    ] = 0.8
    max_throughput_scaling_replicas: Annotated[
        int, Knob("Most replicas of a role that one decision for throughput adds or takes away.", unit="count", ge=1)
    ] = 8


class ForecastSettings(Settings, frozen=True, kw_only=True):
    """What throughput-fpm, hybrid and sla-classic expect to come."""

    predictor: Annotated[
        PredictorName,
        Knob(
            "constant is the last interval; kalman and trend follow a trend, seasonal repeats a period, ensemble "
            "weighs several; arima and prophet need the extra forecast."
        ),
    ] = "kalman"
    log1p: Annotated[bool, Knob("Forecast log(1 + value), which tames bursts; constant takes no notice of it.")] = False
    kalman_q_level: Annotated[
        float, Knob("Variance by which Kalman's level wanders per interval; larger follows faster.", gt=0)
    ] = 1.0
    kalman_q_trend: Annotated[
        float, Knob("Variance by which Kalman's trend wanders per interval; larger follows faster.", gt=0)
    ] = 0.1
    kalman_r: Annotated[float, Knob("Variance of one value that Kalman takes as noise; larger smooths more.", gt=0)] = (
        10.0
    )
    kalman_min_points: Annotated[
        int, Knob("Values before which Kalman tells the last one; fewer forecast a trend sooner.", unit="count", ge=1)
    ] = 5
    warm_up_trace: Annotated[str | None, Knob("Trace that predictors see before any traffic; unset is none.")] = None


class ClassicSettings(Settings, frozen=True, kw_only=True):
    """The field's older ways, by the policies that have them."""

    load: LoadClassicSettings = LoadClassicSettings()
    sla: SlaClassicSettings = SlaClassicSettings()
    thresholds: ThresholdSettings = ThresholdSettings()
    fpm: FpmSettings = FpmSettings()
    forecast: ForecastSettings = ForecastSettings()
    profile: Annotated[
        str | None,
        Knob("Folder with a profile of the engines, in Dynamo's NPZ or JSON layout; unset is none."),
    ] = None
