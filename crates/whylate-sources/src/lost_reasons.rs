// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that each reason for lost events is documented.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use whylate_model::sources::{CARDS, Card, IRQSOFF};

pub(crate) fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    let each = entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    each.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
}

/// Returns the names in a file: in tables called `LOST`, in functions that yield or name lost events, and next to
/// `lost` or `count_lost`.
fn names_in(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let mut names = BTreeSet::new();
    // The last line of a table or function that has started above.
    let mut until = None;
    for line in code.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.contains("const LOST: ") && !line.ends_with(';') {
            until = Some(String::new());
        } else if line.contains("fn take_lost(") || line.contains("fn named(lost") {
            until = Some(format!("{indent}}}"));
        }
        let is_beside = ["lost.insert(\"", "lost.entry(\"", ".count_lost(\""].iter().any(|by| line.contains(by));
        if until.is_some() || is_beside {
            let quoted = line.split('"').skip(1).step_by(2);
            let is_name = |text: &&str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            names.extend(quoted.filter(is_name).map(str::to_owned));
        }
        let ends = |end: &String| if end.ends_with('}') { line == end } else { line.ends_with("];") };
        if until.as_ref().is_some_and(ends) {
            until = None;
        }
    }
    names
}

#[test]
fn each_reason_is_documented() {
    let sources_of = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../whylate-model/src");
    let mut found = BTreeSet::new();
    for (file, of) in rust_files(&sources_of)
        .into_iter()
        .map(|file| (file, None))
        .chain(
            // Traces sent by users are read there.
            rust_files(&model.join("ftrace")).into_iter().map(|file| (file, Some(&IRQSOFF))),
        )
        .chain([(model.join("merge.rs"), None)])
        // A command counts waits that it did not follow.
        .chain([(model.join("../../whylate/src/cli/program.rs"), None)])
    {
        if file.ends_with("lost_reasons.rs") {
            continue;
        }
        let inside = file.strip_prefix(&sources_of).ok().and_then(|path| path.iter().next()?.to_str());
        let source = of.or_else(|| CARDS.into_iter().find(|card| Some(card.name) == inside));
        for name in names_in(&fs::read_to_string(&file).expect("text")) {
            let is_explained = match source {
                Some(card) => card.meaning(&name).is_some(),
                // Reasons shared by sources.
                None => CARDS.iter().any(|card| card.meaning(&name).is_some()),
            };
            assert!(
                is_explained,
                "{} yields {name}: explain it on its card in whylate-model/src/sources/",
                file.display()
            );
            found.insert(name);
        }
    }
    let explained: BTreeSet<String> =
        CARDS.into_iter().flat_map(Card::reasons).map(|reason| reason.name.to_owned()).collect();
    assert_eq!(found, explained, "explained is what there is");
}
