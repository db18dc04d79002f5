// SPDX-License-Identifier: MIT OR Apache-2.0
//! Labels of threads by name and TID.

use std::borrow::Cow;

/// Flag in the TID of a thread outside the observer's PID namespace, added to its TID in the initial namespace, which
/// is below 2^22. So threads outside have unique TIDs that differ from all inside.
pub const OUTSIDE: u32 = 1 << 31;

/// Formats a TID or PID.
pub fn number(tid: u32) -> String {
    if tid & OUTSIDE != 0 { "outside".to_owned() } else { tid.to_string() }
}

/// Returns a thread's label: `name:tid`, or `name:outside`.
pub fn called(name: &str, tid: u32) -> String {
    format!("{name}:{}", number(tid))
}

/// Strips the `:tid` suffix added by [`called`].
pub fn strip_tid(called: &str) -> &str {
    match called.rsplit_once(':') {
        Some((name, number)) if number == "outside" || number.parse::<u32>().is_ok() => name,
        _ => called,
    }
}

/// Strips the TID from a label with an operation as well: `vda (read by dd:4711)` becomes `vda (read by dd)`, and
/// `dd:4711 (writes)` becomes `dd (writes)`.
pub fn by_name(called: &str) -> Cow<'_, str> {
    let (who, how) = called.strip_suffix(')').and_then(|rest| rest.split_once(" (")).unwrap_or((called, ""));
    let [named, named_in_it] = [who, how].map(|of| {
        // A device without a name is labeled `259:3`.
        Some(strip_tid(of)).filter(|name| name.parse::<u32>().is_err()).unwrap_or(of)
    });
    match named.len() + named_in_it.len() < who.len() + how.len() {
        false => called.into(),
        true if how.is_empty() => named.into(),
        true => format!("{named} ({named_in_it})").into(),
    }
}

/// Normalizes a label, so that threads of one pool, or of different runs, are equal: strips the TID, and replaces
/// numbers after a character that is neither letter nor digit. `kworker/0:1-events:77` becomes `kworker/*:*-events`,
/// `vda (read by dd:4711)` becomes `vda (read by dd)`.
pub fn alike(called: &str) -> String {
    let name = by_name(called);
    let (mut normalized, mut before) = (String::with_capacity(name.len()), None);
    for c in name.chars() {
        let is_within_number = before == Some('*') && c.is_ascii_digit();
        let begins_number = c.is_ascii_digit() && before.is_some_and(|before: char| !before.is_alphanumeric());
        match (is_within_number, begins_number) {
            (true, _) => {}
            (false, true) => {
                normalized.push('*');
                before = Some('*');
            }
            (false, false) => {
                normalized.push(c);
                before = Some(c);
            }
        }
    }
    normalized
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_tids_from_labels() {
        for (called, name) in [
            ("dd:4711", "dd"),
            ("a:b:outside", "a:b"),
            ("vda (write by dd:4711)", "vda (write by dd)"),
            ("kworker/0:1-events:77", "kworker/0:1-events"),
            ("CPU 1", "CPU 1"),
            ("(sd-pam):9", "(sd-pam)"),
            ("dd:4711 (writes)", "dd (writes)"),
            ("259:3", "259:3"),
            ("259:3 (write by dd:outside)", "259:3 (write by dd)"),
            ("nvme0n1 (no free request)", "nvme0n1 (no free request)"),
        ] {
            assert_eq!(by_name(called), name);
        }
    }

    #[test]
    fn normalizes_names_of_pools() {
        for (called, name) in [
            ("kworker/0:1-events:77", "kworker/*:*-events"),
            ("kworker/u8:13:77", "kworker/u8:*"),
            ("iou-sqp-4711:4712", "iou-sqp-*"),
            ("dd:outside", "dd"),
            ("vda (read by dd:4711)", "vda (read by dd)"),
            ("dd:4711 (writes)", "dd (writes)"),
            ("259:3", "259:*"),
            ("run queue of CPU 12", "run queue of CPU *"),
            ("opt 4lgyvyourp7:21840", "opt *lgyvyourp7"),
            ("cc1:5", "cc1"),
            ("2to3", "2to3"),
            ("", ""),
            (")", ")"),
            ("*12", "*"),
        ] {
            assert_eq!(alike(called), name, "{called}");
        }
    }

    #[test]
    fn thread_outside_namespace_has_no_tid() {
        assert_eq!(called("kworker/0:1", 77), "kworker/0:1:77");
        assert_eq!(called("dd", OUTSIDE | 4_194_303), "dd:outside");
        let names = ["kworker/0:1:77", "dd:outside", "CPU 1"].map(strip_tid);
        assert_eq!(names, ["kworker/0:1", "dd", "CPU 1"]);
    }
}
