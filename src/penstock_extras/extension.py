"""What the companion of extras adds: batches, jobs of engines, audit, shadows, JWT, gRPC for clients, OTLP."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="extras",
    entries={
        "tick listener": {"tensorboard": "penstock_extras.telemetry.tensorboard_log:tensorboard_log"},
        "check": {
            "audit": "penstock_extras.extras_checks:audit_complaints",
            "jwt": "penstock_extras.extras_checks:jwt_complaints",
        },
        "command": {"audit": "penstock_extras.cli.audit:command"},
        "route description": {"batches": "penstock_extras.batches.batch_openapi:description"},
        "route": {
            "batches": "penstock_extras.batches.batch_extension:routes",
            "jobs": "penstock_extras.jobs.job_extension:routes",
        },
        "answer filter": {"audit": "penstock_extras.audit.audit_log:open_log"},
        "request end": {"shadows": "penstock_extras.shadows.shadow_desk:ShadowDesk"},
        "key verifier": {"jwt": "penstock_extras.jwt.jwt_verifier:verifier_of"},
        "listener": {
            "open-inference": "penstock_extras.open_inference.inference_listener:InferenceListener",
            "planner plugins": "penstock_extras.plugins.plugin_host:PluginHost",
        },
        "telemetry": {"otlp": "penstock_extras.telemetry.otel_tracer:OtelTracer"},
    },
)
