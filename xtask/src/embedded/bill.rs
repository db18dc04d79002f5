// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bill of materials, in CycloneDX's JSON.

use anyhow::Result;
use serde_json::{Value, json};

use super::Component;

/// Returns the bill of materials of whylate with these components. Equal components give equal bytes.
pub fn of(components: &[Component], time: &str) -> Result<String> {
    let whylate = format!("pkg:generic/whylate@{}", env!("CARGO_PKG_VERSION"));
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "component": {
                "type": "application",
                "bom-ref": whylate,
                "name": "whylate",
                "version": env!("CARGO_PKG_VERSION"),
                "purl": whylate,
                "licenses": [{"expression": "(MIT OR Apache-2.0) AND (GPL-2.0-only OR BSD-2-Clause)"}],
            },
        },
        "components": components.iter().map(component).collect::<Vec<_>>(),
        "dependencies": [{"ref": whylate, "dependsOn": components.iter().map(reference).collect::<Vec<_>>()}],
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

/// Returns the name by which a component is referred to.
fn reference(component: &Component) -> String {
    format!("{}@{}", component.name, component.version)
}

fn component(component: &Component) -> Value {
    let mut value = json!({
        "type": "library",
        "bom-ref": reference(component),
        "name": component.name,
        "version": component.version,
        "purl": component.url,
        "scope": "required",
        "copyright": component.notices.join("; "),
        "licenses": [{"expression": component.offered}],
    });
    if let Some(sha256) = &component.sha256 {
        value["hashes"] = json!([{"alg": "SHA-256", "content": sha256}]);
    }
    value
}
