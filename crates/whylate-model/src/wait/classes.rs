// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classes of waits by the names of frames: rules of one's own, and what is known of common programs.

use thiserror::Error;

use super::WaitClass;

/// Rules of one's own: waits whose stack has one of these frames are of this class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    rules: Vec<(WaitClass, String)>,
}

/// Why rules could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct ClassesError {
    /// Which line, from 1 on.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// Those that a rule may name, by their names in JSON.
const NAMES: [(&str, WaitClass); 11] = [
    ("idle", WaitClass::Idle),
    ("disk", WaitClass::Disk),
    ("network", WaitClass::Network),
    ("lock", WaitClass::Lock),
    ("pipe", WaitClass::Pipe),
    ("terminal", WaitClass::Terminal),
    ("message_queue", WaitClass::MessageQueue),
    ("memory", WaitClass::Memory),
    ("page_fault", WaitClass::PageFault),
    ("timer", WaitClass::Timer),
    ("other", WaitClass::Other),
];

impl Classes {
    /// Reads rules: on each line a class and a frame, whose name may have `*` for anything. Empty lines, and those that
    /// begin with `#`, say nothing.
    ///
    /// # Errors
    /// When a line is no rule.
    pub fn parse(text: &str) -> Result<Self, ClassesError> {
        let mut rules = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, frame) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let error = |reason: String| ClassesError { line: number, reason };
            let Some(&(_, class)) = NAMES.iter().find(|(known, _)| *known == name) else {
                let known: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
                let name = crate::units::printable(name);
                return Err(error(format!("{name:?} is no class of waits (choose from {})", known.join(", "))));
            };
            let frame = frame.trim();
            if frame.chars().all(|c| c == '*') {
                return Err(error(format!("name a function after {name}, such as {name} my_wait")));
            }
            rules.push((class, frame.to_owned()));
        }
        Ok(Classes { rules })
    }

    /// The class of the first of these frames that has a rule, and that frame.
    pub(super) fn of<'a>(&self, frames: impl IntoIterator<Item = &'a String>) -> Option<(WaitClass, &'a str)> {
        frames.into_iter().find_map(|frame| {
            let (class, _) = self.rules.iter().find(|(_, pattern)| is_named(frame, pattern))?;
            Some((*class, frame.as_str()))
        })
    }
}

/// Functions of common programs in which they wait for something by means that look like idleness.
const OF_PROGRAMS: &[(WaitClass, &[&str], &str)] = &[
    (
        WaitClass::Lock,
        &[
            "ProcSleep",
            "LWLockAcquire",
            "LWLockAcquireOrWait",
            "LWLockWaitForVar",
            "LockBufferForCleanup",
            "PGSemaphoreLock",
        ],
        "waits for a lock of PostgreSQL",
    ),
    (WaitClass::Network, &["SyncRepWaitForLSN"], "waits for a standby of PostgreSQL"),
    // They take in what others have submitted, who wait for it.
    (
        WaitClass::Idle,
        &["LinuxAIOHandler::*", "io_handler_thread", "fil_aio_wait", "tpool::aio_linux::*"],
        "waits for requests of others to be done (InnoDB)",
    ),
    (
        WaitClass::Lock,
        &[
            "lock_wait_suspend_thread",
            "MDL_wait::timed_wait",
            "sync_array_wait_event",
            "rw_lock_s_lock_spin",
            "rw_lock_x_lock_func",
        ],
        "waits for a lock of MySQL",
    ),
    (WaitClass::Lock, &["sqliteDefaultBusyCallback"], "waits for a lock of SQLite"),
    (WaitClass::Lock, &["take_gil"], "waits for Python's global interpreter lock"),
    (WaitClass::Lock, &["gvl_acquire", "gvl_acquire_core", "thread_sched_to_running"], "waits for Ruby's global lock"),
    (
        WaitClass::Lock,
        &[
            "ObjectMonitor::enter*",
            "ObjectSynchronizer::enter*",
            "SafepointSynchronize::block",
            "SafepointMechanism::process*",
        ],
        "waits for a monitor or a safepoint of the Java machine",
    ),
    (WaitClass::Network, &["PQgetResult", "PQconnectPoll", "pqWait*"], "waits for PostgreSQL's answer"),
    (WaitClass::Network, &["__res_context_send", "__libc_res_nsend", "__libc_res_nquery"], "waits for a name server"),
];

/// The class by a program's own function, if one of these frames is such, and why.
pub(super) fn of_program(user: &[String]) -> Option<(WaitClass, &'static str, &str)> {
    user.iter().find_map(|frame| {
        let (class, _, why) =
            OF_PROGRAMS.iter().find(|(_, names, _)| names.iter().any(|pattern| is_named(frame, pattern)))?;
        Some((*class, *why, frame.as_str()))
    })
}

/// Whether the pattern is of this frame, as a whole or without its parameters, file and line.
fn is_named(frame: &str, pattern: &str) -> bool {
    // Most are told apart by their first character, and there are many of both.
    let first = pattern.as_bytes().first();
    if first != Some(&b'*') && first != frame.as_bytes().first() {
        return false;
    }
    let bare = frame.split_once('(').map_or(frame, |(name, _)| name.trim_end());
    fits(bare, pattern) || fits(frame, pattern)
}

/// Whether the pattern, in which `*` stands for anything, is of the whole text.
fn fits(text: &str, pattern: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (between, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in between.split('*') {
        // The earliest place leaves most for the others.
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rules_are_classes_and_frames() {
        let text = "# of our server\n\nlock  my_lock\r\n\tidle queue_pop(int, char)\nnetwork *::Rpc*::call*\n";
        let classes = Classes::parse(text).expect("rules");
        let class_of = |frame: &str| classes.of(&[frame.to_owned()]).map(|(class, _)| class);
        for (frame, class) in [
            ("my_lock", Some(WaitClass::Lock)),
            ("my_lock (lock.c:7)", Some(WaitClass::Lock)),
            ("my_lock(Mutex*)", Some(WaitClass::Lock)),
            ("my_locks", None),
            ("queue_pop(int, char)", Some(WaitClass::Idle)),
            ("queue_pop(int)", None),
            ("net::RpcClient::call_all", Some(WaitClass::Network)),
            ("net::RpcClient", None),
        ] {
            assert_eq!(class_of(frame), class, "{frame}");
        }
    }

    #[test]
    fn the_line_that_is_no_rule_is_named() {
        let error = |text| Classes::parse(text).expect_err("no rules").to_string();
        assert_eq!(
            error("lock f\n\nlok f\n"),
            "line 3: \"lok\" is no class of waits (choose from idle, disk, network, lock, pipe, terminal, message_queue, memory, page_fault, timer, other)"
        );
        assert_eq!(error("lock"), "line 1: name a function after lock, such as lock my_wait");
        assert_eq!(error("# all\nidle **"), "line 2: name a function after idle, such as idle my_wait");
        assert!(!error("\x1b[2J f").contains('\x1b'));
        assert_eq!(Classes::parse("\n#\n"), Ok(Classes::default()));
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (text, pattern, is_it) in [
            ("abc", "abc", true),
            ("abc", "a*", true),
            ("abc", "*c", true),
            ("abc", "*b*", true),
            ("abc", "a*b*c", true),
            ("abc", "a*c*c", false),
            ("abc", "abc*", true),
            ("ab", "ab*b", false),
            ("", "*", true),
            ("aXbXc", "a*X*c", true),
        ] {
            assert_eq!(fits(text, pattern), is_it, "{text} {pattern}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in "(?s).*", frame in ".*", pattern in "[a*é]{0,8}") {
            let _ = Classes::parse(&text);
            fits(&frame, &pattern);
            is_named(&frame, &pattern);
        }
    }
}
