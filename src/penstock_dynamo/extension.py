"""What the Dynamo companion adds: the policies and predictors of Dynamo's planners, and its virtual connector."""

from penstock.extension import Extension

POLICIES = "penstock_dynamo.policies.dynamo_policies"
PREDICTORS = "penstock_dynamo.forecast.predictor_makers"

EXTENSION = Extension(
    name="dynamo",
    entries={
        "importer": {"dynamo": "penstock_dynamo.importing.dynamo_options:import_options"},
        "check": {"classic": "penstock_dynamo.policies.classic_contradictions:classic_complaints"},
        "file check": {"classic": "penstock_dynamo.profile_folder:warm_up_trace"},
        "settings": {"classic": "penstock_dynamo.settings_classic:ClassicSettings"},
        "policy": {
            "thresholds": f"{POLICIES}:of_thresholds",
            "load-classic": f"{POLICIES}:of_load_classic",
            "sla-classic": f"{POLICIES}:of_sla_classic",
            "throughput-fpm": f"{POLICIES}:of_throughput_fpm",
            "hybrid": f"{POLICIES}:of_hybrid_fpm",
            "load-fpm": f"{POLICIES}:of_load_fpm",
            "load-fpm-1.6": f"{POLICIES}:of_load_fpm_1_6",
        },
        "predictor": {
            name: f"{PREDICTORS}:{name}"
            for name in ("constant", "kalman", "arima", "prophet", "seasonal", "trend", "ensemble")
        },
        "connector": {"virtual": "penstock_dynamo.virtual.virtual_keys_access:virtual_connector"},
    },
)
