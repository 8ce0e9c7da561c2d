"""What the Kubernetes companion adds: discovery over its API server, and scaling by it."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="kubernetes",
    entries={
        "store": {"kubernetes": "penstock.adapters.stores.kubernetes_store:open_kubernetes_store"},
        "doctor check": {"kubernetes": "penstock.cli.doctor_checks.kubernetes_checks:check_kubernetes"},
        "listener": {"keda": "penstock.adapters.plugins.keda_scaler:KedaScaler"},
        "connector": {"kubernetes": "penstock.adapters.connectors.kubernetes.configured_targets:kubernetes_connector"},
    },
)
