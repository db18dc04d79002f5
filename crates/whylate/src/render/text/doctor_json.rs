// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the capabilities of this kernel as one line of JSON.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use whylate_sources::capabilities::{Capabilities, CpuList, Fact, Readiness};

use super::doctor::word;
use crate::json::write_line;

/// Writes the object. States are `yes`, `no` or `unknown`; inapplicable or unknown values are `null`.
pub fn write(found: &Capabilities, out: &mut impl Write) -> io::Result<()> {
    write_line(out, &object(found))
}

fn object(found: &Capabilities) -> Value {
    let bpf: Map<String, Value> =
        found.bpf.each().map(|(key, _, one)| (key.to_owned(), fact(one))).into_iter().collect();
    let capabilities: Map<String, Value> = found
        .privileges
        .capabilities
        .iter()
        .map(|one| (one.name.to_lowercase(), json!({"state": word(one.state), "loss": one.loss})))
        .collect();
    let sysctls: Map<String, Value> = found
        .sysctls
        .iter()
        .map(|one| (one.name.to_owned(), json!({"value": one.value, "detail": one.detail})))
        .collect();
    let (btf, tracefs, cpus) = (&found.btf, &found.tracefs, &found.cpus);
    json!({
        "schema": 1,
        "kernel": {
            "release": found.kernel.release,
            "arch": found.kernel.arch,
            "preemption": found.kernel.preemption,
        },
        "btf": {
            "state": word(btf.fact.state),
            "detail": btf.fact.detail,
            "path": btf.path,
            "size_bytes": btf.size_bytes,
        },
        "tracefs": {
            "state": word(tracefs.fact.state),
            "detail": tracefs.fact.detail,
            "path": tracefs.path,
            "tracers": tracefs.tracers,
        },
        "bpf": bpf,
        "uid": found.privileges.uid,
        "in_first_user_namespace": found.privileges.in_first_user_namespace,
        "capabilities": capabilities,
        "lockdown": fact(&found.lockdown),
        "sysctls": sysctls,
        "clock_source": {
            "current": found.clock_source.current,
            "available": found.clock_source.available,
            "slow": found.clock_source.is_slow(),
        },
        "cpus": {
            "online": cpu_list(cpus.online.as_ref()),
            "possible": cpu_list(cpus.possible.as_ref()),
            "isolated": cpu_list(cpus.isolated.as_ref()),
            "nohz_full": cpu_list(cpus.nohz_full.as_ref()),
            "measured": cpu_list(cpus.measured.as_ref()),
            "left_out": cpus.left_out,
        },
        "hypervisor": fact(&found.hypervisor),
        "sources": found.sources.iter().map(readiness).collect::<Vec<_>>(),
        "causes": readiness(&found.causes),
        "injections": found.injections.iter().map(readiness).collect::<Vec<_>>(),
    })
}

fn fact(fact: &Fact) -> Value {
    json!({"state": word(fact.state), "detail": fact.detail})
}

fn cpu_list(cpus: Option<&CpuList>) -> Value {
    cpus.map_or(Value::Null, |cpus| json!({"list": cpus.list, "count": cpus.count}))
}

fn readiness(source: &Readiness) -> Value {
    let better: Vec<Value> = source
        .better
        .iter()
        .map(|one| json!({"backend": one.backend, "state": word(one.state), "reasons": one.reasons}))
        .collect();
    json!({
        "name": source.name,
        "state": word(source.state),
        "backend": source.backend,
        "weaker": source.limitations,
        "better": better,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::doctor::tests::example;

    #[test]
    fn programs_get_every_fact() {
        let text = serde_json::to_string_pretty(&object(&example())).expect("plain data");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn it_is_one_line() {
        let mut out = Vec::new();
        write(&example(), &mut out).expect("memory takes everything");
        let text = String::from_utf8_lossy(&out);
        assert_eq!(text.lines().count(), 1);
        assert!(text.ends_with("}\n") && !text.contains('\u{1b}'));
    }
}
