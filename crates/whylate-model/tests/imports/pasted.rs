// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports tool outputs as people paste them into reports.

#[path = "mangle.rs"]
mod mangle;

use std::collections::BTreeMap;

use mangle::{Kind, TEXTS, WAYS, check, imported, mangle, some_lines};
use whylate_model::sniff::{Content, sniff};

/// Number of mangled texts to import, unless `WHYLATE_PASTES` is set.
const PASTES: u64 = 600;

/// xorshift64*
fn random(seed: u64) -> impl FnMut() -> u8 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    }
}

#[test]
fn mangled_text_parses_equally_or_is_refused_or_counted() {
    let pastes = std::env::var("WHYLATE_PASTES").ok().and_then(|number| number.parse().ok()).unwrap_or(PASTES);
    let (mut same, mut refused, mut wrong) = (0, 0, BTreeMap::new());
    for seed in 0..pastes {
        let mut choose = random(seed);
        let (kind, text) = TEXTS[usize::from(choose()) % TEXTS.len()];
        let text = some_lines(text, &mut choose);
        let Ok(original) = imported(kind, text.as_bytes()) else { continue };
        let (bytes, done) = mangle(&text, &mut choose);
        match imported(kind, &bytes) {
            Ok(outcome) => same += u64::from(outcome.answer == original.answer),
            Err(_) => refused += 1,
        }
        if let Err(why) = check(kind, &bytes, &original) {
            if pastes == seed + 1 {
                println!("{}", String::from_utf8_lossy(&bytes));
            }
            let done = format!("{kind:?}, {}, e.g. seed {seed}", done.join(", "));
            wrong.insert(done, why);
        }
    }
    println!("{pastes} pastes: {same} with the same answer, {refused} refused, {} wrong", wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(same * 10 >= pastes * 7, "too few are understood: {same} of {pastes}");
}

/// Returns the kind as which a text is recognized, or why it is not.
fn recognized(text: &str) -> Result<Kind, String> {
    let sniffed = sniff(text.as_bytes()).map_err(|error| error.to_string())?;
    Ok(match sniffed.content {
        Content::Interrupts => Kind::Irqs,
        Content::Switches => Kind::Trace,
        Content::Stacks => Kind::Stacks,
    })
}

/// Each single mangling is undone without a loss, unless text is missing. A line cut at the terminal's edge may be
/// refused, as may a latency trace without its header.
#[test]
fn undoes_each_single_mangling() {
    for (kind, text) in TEXTS {
        let text = some_lines(text, &mut || 255);
        let original = imported(kind, text.as_bytes()).expect("a good text");
        for (name, way) in WAYS {
            for how in [0, 1, 2, 12, 21] {
                let mangled = way(&text, how);
                if let Err(why) = check(kind, mangled.as_bytes(), &original) {
                    panic!("{kind:?}, {name} {how}: {why}\n{mangled}");
                }
                if name.starts_with("cut off") || name == "half quoted" {
                    continue;
                }
                match imported(kind, mangled.as_bytes()) {
                    Ok(outcome) => {
                        let differs = || mangle::difference(&outcome.answer, &original.answer);
                        assert!(outcome.answer == original.answer, "{name} {how}: {}:\n{mangled}", differs());
                        assert_eq!(recognized(&mangled), Ok(kind), "{name} {how}:\n{mangled}");
                    }
                    Err(why) => {
                        let is_right = match name {
                            "cut at the edge" => why.contains("wrapped"),
                            "without comments" => why.contains("copy all of it"),
                            _ => false,
                        };
                        assert!(is_right, "{name} {how}: {why}\n{mangled}");
                    }
                }
            }
        }
    }
}

#[test]
fn truncated_line_does_not_change_names() {
    for (kind, text) in TEXTS.into_iter().filter(|(kind, _)| *kind != Kind::Irqs) {
        let text = some_lines(text, &mut || 255);
        let original = imported(kind, text.as_bytes()).expect("a good text");
        // At line ends, fewer lines are no loss.
        for at in (text.len() / 2..text.len()).filter(|&at| !text[..at].ends_with('\n')) {
            let Ok(outcome) = imported(kind, &text.as_bytes()[..at]) else { continue };
            if kind == Kind::Trace {
                let invented: Vec<&String> = outcome.names.difference(&original.names).collect();
                assert!(invented.is_empty(), "{invented:?}:\n{}", &text[..at]);
            }
        }
    }
}
