"""What the companion of extras adds: batches, jobs of engines, audit, shadows, JWT, gRPC for clients, OTLP."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="extras",
    entries={
        "tick listener": {"tensorboard": "penstock.adapters.telemetry.tensorboard_log:tensorboard_log"},
        "command": {"audit": "penstock.cli.audit:command"},
        "route description": {"batches": "penstock.frontend.batches.batch_openapi:description"},
        "route": {
            "batches": "penstock.frontend.batches.batch_extension:routes",
            "jobs": "penstock.frontend.jobs.job_extension:routes",
        },
        "answer filter": {"audit": "penstock.frontend.audit.audit_log:open_log"},
        "request end": {"shadows": "penstock.frontend.shadows.shadow_desk:ShadowDesk"},
        "key verifier": {"jwt": "penstock.frontend.tenants.jwt_verifier:verifier_of"},
        "listener": {
            "open-inference": "penstock.frontend.open_inference.inference_listener:InferenceListener",
            "planner plugins": "penstock.adapters.plugins.plugin_host:PluginHost",
        },
        "telemetry": {"otlp": "penstock.adapters.telemetry.otel_tracer:OtelTracer"},
    },
)
