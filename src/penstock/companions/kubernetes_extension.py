"""What the Kubernetes companion adds: discovery over its API server, and scaling by it."""

from penstock.extension import Extension

PICKER = "penstock.picker.picker_process"
"""Module of a frontend process that a gateway in front asks."""

EXTENSION = Extension(
    name="kubernetes",
    entries={
        "command": {name: f"penstock.cli.{name}:command" for name in ("epp", "operator", "picker", "render")},
        "client": {"kubernetes": "penstock.cli.shared.port_forward:PodClient"},
        "frontend process": {"picker": "penstock.companions.kubernetes_extension:PICKER"},
        "source": {"kubernetes": "penstock.runtime.supervision.pod_pool:PodSource"},
        "check": {"picker": "penstock.config.picker_checks:picker_complaints"},
        "settings": {"picker": "penstock.config.settings.picker_settings:PickerSettings"},
        "store": {"kubernetes": "penstock.adapters.stores.kubernetes_store:open_kubernetes_store"},
        "doctor check": {"kubernetes": "penstock.cli.doctor_checks.kubernetes_checks:check_kubernetes"},
        "listener": {"keda": "penstock.adapters.plugins.keda_scaler:KedaScaler"},
        "connector": {"kubernetes": "penstock.adapters.connectors.kubernetes.configured_targets:kubernetes_connector"},
    },
)
