// SPDX-License-Identifier: MIT OR Apache-2.0
//! Outputs of tools as people paste them.

#[path = "pasted/mangle.rs"]
mod mangle;

use std::collections::BTreeMap;

use mangle::{Kind, TEXTS, WAYS, check, imported, mangle, some_lines};

/// So many mangled texts are imported, unless `WHYLATE_PASTES` says another number.
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
fn a_mangled_text_has_the_same_answer_or_is_refused_or_what_is_dropped_is_counted() {
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

/// What is done alone is undone without a loss, unless text is missing then. A cut at the edge of a terminal may be
/// refused, and so is a latency trace without its heading.
#[test]
fn each_way_to_mangle_a_text_is_undone() {
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
                    Ok(outcome) => assert!(
                        outcome.answer == original.answer,
                        "{name} {how}: {}:\n{mangled}",
                        mangle::difference(&outcome.answer, &original.answer)
                    ),
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
fn what_is_cut_off_in_the_middle_of_a_line_is_not_renamed() {
    for (kind, text) in TEXTS.into_iter().filter(|(kind, _)| *kind != Kind::Irqs) {
        let text = some_lines(text, &mut || 255);
        let original = imported(kind, text.as_bytes()).expect("a good text");
        // Where the text still ends in a whole line, less is no loss.
        for at in (text.len() / 2..text.len()).filter(|&at| !text[..at].ends_with('\n')) {
            let Ok(outcome) = imported(kind, &text.as_bytes()[..at]) else { continue };
            if kind == Kind::Trace {
                let invented: Vec<&String> = outcome.names.difference(&original.names).collect();
                assert!(invented.is_empty(), "{invented:?}:\n{}", &text[..at]);
            }
        }
    }
}
