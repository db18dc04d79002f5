// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that threads which measure are known by their names: the delays that they cause are the cost of measuring.

use std::fs;
use std::path::Path;

use whylate_model::own::{Own, own};

use crate::lost_reasons::rust_files;

#[test]
fn each_thread_that_measures_is_known() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names = 0;
    for file in rust_files(&source).into_iter().filter(|file| !file.ends_with("thread_names.rs")) {
        let text = fs::read_to_string(&file).expect("text");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let is_injected = file.starts_with(source.join("inject"));
        for name in code.split("Builder::new().name(\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            let expected = if is_injected { Own::Injects } else { Own::Measures };
            assert_eq!(own(name), Some(expected), "{} starts {name}: see whylate-model/src/own.rs", file.display());
            names += 1;
        }
    }
    assert!(names > 10, "only {names} names");
}
