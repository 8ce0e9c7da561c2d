"""What the Kubernetes companion adds: discovery over its API server, and scaling by it."""

from penstock.extension import Extension

PICKER = "penstock_kubernetes.picker.picker_process"
"""Module of a frontend process that a gateway in front asks."""

EXTENSION = Extension(
    name="kubernetes",
    entries={
        "command": {
            name: f"penstock_kubernetes.cli.{name}:command" for name in ("epp", "operator", "picker", "render")
        },
        "client": {"kubernetes": "penstock_kubernetes.cli.port_forward:PodClient"},
        "frontend process": {"picker": "penstock_kubernetes.extension:PICKER"},
        "source": {"kubernetes": "penstock_kubernetes.pod_pool:PodSource"},
        "check": {"picker": "penstock_kubernetes.picker_checks:picker_complaints"},
        "settings": {"picker": "penstock_kubernetes.picker_settings:PickerSettings"},
        "store": {"kubernetes": "penstock_kubernetes.store.kubernetes_store:open_kubernetes_store"},
        "doctor check": {"kubernetes": "penstock_kubernetes.cli.kubernetes_checks:check_kubernetes"},
        "listener": {"keda": "penstock_kubernetes.keda_scaler:KedaScaler"},
        "connector": {"kubernetes": "penstock_kubernetes.connector.configured_targets:kubernetes_connector"},
    },
)
