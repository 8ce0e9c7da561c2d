"""What this package adds to Penstock; each entry is imported when it is used."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="by-label",
    entries={
        "scorer": {"label-cost": "by_label.label_cost:LabelCost"},
        "filter": {"tenant-label": "by_label.tenant_label:TenantLabel"},
        "route": {"by-label": "by_label.label_route:routes"},
    },
)
