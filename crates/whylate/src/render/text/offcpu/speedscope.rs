// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the file format of speedscope: <https://www.speedscope.app/file-format-schema.json>.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use serde_json::json;
use whylate_model::Snapshot;
use whylate_model::folded::{Root, frames, waiting};

use crate::json::write_line;

/// Writes a profile for each process, thread or cgroup (`root`); weights are nanoseconds.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot, root: Root, hide_idle: bool) -> io::Result<()> {
    let mut index_of: HashMap<String, usize> = HashMap::new();
    let mut names = Vec::new();
    let mut profiles: BTreeMap<String, (Vec<Vec<usize>>, Vec<u64>)> = BTreeMap::new();
    for stack in waiting(snapshot, hide_idle) {
        let frames = frames(stack, root);
        let title = frames.first().map(|frame| frame.name.clone()).unwrap_or_default();
        let indices = frames
            .into_iter()
            .map(|frame| {
                *index_of.entry(frame.name.clone()).or_insert_with(|| {
                    names.push(json!({ "name": frame.name }));
                    names.len() - 1
                })
            })
            .collect();
        let profile = profiles.entry(title).or_default();
        profile.0.push(indices);
        profile.1.push(stack.weight_ns);
    }
    let profiles: Vec<_> = profiles
        .into_iter()
        .map(|(name, (samples, weights))| {
            json!({
                "type": "sampled", "name": name, "unit": "nanoseconds", "startValue": 0,
                "endValue": weights.iter().sum::<u64>(), "samples": samples, "weights": weights,
            })
        })
        .collect();
    let file = json!({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": concat!("whylate ", env!("CARGO_PKG_VERSION")),
        "name": "off-CPU time",
        "shared": { "frames": names },
        "profiles": profiles,
    });
    write_line(out, &file)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::sample;
    use super::*;

    /// Checks every member that the schema requires, with its type and allowed values.
    fn required(file: &Value) {
        assert_eq!(file["$schema"], "https://www.speedscope.app/file-format-schema.json");
        assert!(file["name"].is_string() && file["exporter"].is_string());
        for frame in file["shared"]["frames"].as_array().expect("frames") {
            assert!(frame["name"].is_string() && frame.as_object().is_some_and(|frame| frame.len() == 1), "{frame}");
        }
        for profile in file["profiles"].as_array().expect("profiles") {
            assert_eq!(profile["type"], "sampled");
            assert_eq!(profile["unit"], "nanoseconds");
            assert!(profile["name"].is_string());
            for number in ["startValue", "endValue"] {
                assert!(profile[number].is_number(), "{number}");
            }
            for list in ["samples", "weights"] {
                assert!(profile[list].is_array(), "{list}");
            }
            assert_eq!(profile.as_object().map(serde_json::Map::len), Some(7), "it has unknown members");
        }
    }

    fn written(snapshot: &Snapshot) -> Value {
        let mut out = Vec::new();
        write(&mut out, snapshot, Root::Process, false).expect("a vector takes everything");
        serde_json::from_slice(&out).expect("JSON")
    }

    #[test]
    fn wakers_are_frames_behind_those_that_they_woke() {
        let file = written(&sample::with_wakers());
        required(&file);
        let name = |index: &Value| file["shared"]["frames"][index.as_u64().expect("an index") as usize]["name"].clone();
        let profile =
            file["profiles"].as_array().and_then(|all| all.iter().find(|one| one["name"] == "db")).expect("db");
        let names: Vec<Value> = profile["samples"][0].as_array().expect("frames").iter().map(name).collect();
        assert_eq!(names[names.len() - 11..][..3], ["futex_wait", "--", "wake_up_q"], "{names:?}");
        assert_eq!(names.last().and_then(Value::as_str), Some("writer:"));
    }

    #[test]
    fn samples_have_weights_and_frames_that_are_there() {
        let file = written(&sample::snapshot());
        required(&file);
        let frames = file["shared"]["frames"].as_array().expect("frames").len() as u64;
        let profiles = file["profiles"].as_array().expect("profiles");
        assert_eq!(profiles.len(), 2);
        let mut total = 0;
        for profile in profiles {
            let (samples, weights) =
                (profile["samples"].as_array().expect("samples"), profile["weights"].as_array().expect("weights"));
            assert_eq!(samples.len(), weights.len());
            for frame in samples.iter().flat_map(|sample| sample.as_array().expect("frames")) {
                assert!(frame.as_u64().expect("an index") < frames);
            }
            let sum: u64 = weights.iter().map(|weight| weight.as_u64().expect("a weight")).sum();
            assert_eq!(profile["endValue"].as_u64(), Some(sum));
            total += sum;
        }
        assert_eq!(total, 12_000_000_000);
    }
}
