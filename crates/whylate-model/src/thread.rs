// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads by their names and numbers, as whoever looks knows them.

/// In the number of a thread that has none in the PID namespace of whoever looks, added to the kernel's, which is below
/// 2^22. So threads outside are told apart, and none is taken for one inside.
pub const OUTSIDE: u32 = 1 << 31;

/// A thread's or process's number, as it is shown.
pub fn number(tid: u32) -> String {
    if tid & OUTSIDE != 0 { "outside".to_owned() } else { tid.to_string() }
}

/// A thread as causes name it: `name:tid`, or `name:outside`.
pub fn called(name: &str, tid: u32) -> String {
    format!("{name}:{}", number(tid))
}

/// Its name alone, of what [`called`] made of it.
pub fn without_number(called: &str) -> &str {
    match called.rsplit_once(':') {
        Some((name, number)) if number == "outside" || number.parse::<u32>().is_ok() => name,
        _ => called,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_outside_has_no_number() {
        assert_eq!(called("kworker/0:1", 77), "kworker/0:1:77");
        assert_eq!(called("dd", OUTSIDE | 4_194_303), "dd:outside");
        let names = ["kworker/0:1:77", "dd:outside", "CPU 1"].map(without_number);
        assert_eq!(names, ["kworker/0:1", "dd", "CPU 1"]);
    }
}
