// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/results.rs`, which includes this file.

use super::*;
use crate::table::{Show, column, grid};

const ARGUMENTS: Arguments = Arguments { rounds: 3, write: None };

#[test]
fn only_the_named_section_changes() {
    let old = "a\n<!-- x -->\n1\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n";
    assert_eq!(replace(old, "x", "3\n"), "a\n<!-- x -->\n3\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n");
    assert_eq!(replace("a\n", "x", "3\n"), "a\n\n<!-- x -->\n3\n<!-- /x -->\n");
}

#[test]
fn section_has_figures_tables_and_values() {
    let figure = |value| Figure::new("slowdown", value, 1).unit("%").at_most(2.0);
    let section = || Section::new(&ARGUMENTS, "irqsoff-vm-cost").values(&[("kernel", &"6.12"), ("load", &"pipe")]);
    let ns = [column("ns", Show::Median(0), "", |ns: &f64| *ns)];
    let full = section()
        .line("machine", "- a fact")
        .add("table", grid("watcher", &ns, [("ours".to_owned(), vec![&7.0, &9.0])]))
        .line("table", "| none | |")
        .add("table", "A paragraph.");
    let text = full.markdown();
    assert!(text.starts_with("## Cost of `whylate irqsoff` beside") && text.contains("\n- kernel: "), "{text}");
    assert!(text.contains("\n- a fact\n- in the machine: Linux 6.12, CPUs"), "{text}");
    assert!(text.contains("\n\nSlowdown of `pipe`, 3 rounds: each"), "{text}");
    assert!(text.ends_with("\n\n| watcher | ns |\n|---|--:|\n| ours | 8 |\n| none | |\n\nA paragraph.\n"), "{text}");
    assert!(full.figures([figure(1.5)]).publish().expect("printed"));
    let run = Section::new(&ARGUMENTS, "run").figures([figure(2.1)]);
    assert!(
        run.markdown().contains("\n\n| figure | measured | limit | result |\n|---|--:|--:|---|\n| slowdown | 2.1 % |")
    );
    assert!(!run.publish().expect("printed"));
}

#[test]
fn each_name_in_the_texts_is_measured() {
    let files = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).expect("sources");
    let sources = files.filter_map(|entry| fs::read_to_string(entry.expect("a file").path()).ok());
    let sources = sources.collect::<String>();
    for name in TEMPLATES.split('{').skip(1).filter_map(|part| Some(part.split_once('}')?.0)) {
        assert!(sources.contains(&format!("\"{name}\"")), "nothing measures {name}");
    }
    let sections =
        sources.split("Section::new(").skip(1).filter_map(|part| part.split_once(", \"")?.1.split('"').next());
    for section in sections {
        assert!(find(TEMPLATES, section).is_some(), "no text for {section}");
    }
}
