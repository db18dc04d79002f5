// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wait classes by names of frames: the user's own rules, and functions of common programs.

use thiserror::Error;

use super::WaitClass;

/// The user's own rules: a wait with one of these frames in its stack has the rule's class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    rules: Vec<(WaitClass, String)>,
}

/// Why rules could not be parsed.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct ClassesError {
    /// Line number, from 1.
    pub line: usize,
    /// Error in the line.
    pub reason: String,
}

/// Classes that a rule may name, by their names in JSON.
const CLASS_NAMES: [(&str, WaitClass); 11] = [
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
    /// Parses rules: each line has a class and a frame name, where `*` matches anything. Empty lines and those that
    /// start with `#` are skipped.
    ///
    /// # Errors
    /// Fails if a line is not a rule.
    pub fn parse(text: &str) -> Result<Self, ClassesError> {
        let mut rules = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, frame) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let error = |reason: String| ClassesError { line: number, reason };
            let Some(&(_, class)) = CLASS_NAMES.iter().find(|(known, _)| *known == name) else {
                let known: Vec<&str> = CLASS_NAMES.iter().map(|(name, _)| *name).collect();
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

    /// Returns the class of the first of these frames that has a rule, and that frame.
    pub(super) fn class_of<'a>(&self, frames: impl IntoIterator<Item = &'a String>) -> Option<(WaitClass, &'a str)> {
        frames.into_iter().find_map(|frame| {
            let (class, _) = self.rules.iter().find(|(_, pattern)| matches_frame(frame, pattern))?;
            Some((*class, frame.as_str()))
        })
    }
}

/// Functions of common programs in which they wait for something, although the wait looks idle.
const PROGRAM_FUNCTIONS: &[(WaitClass, &[&str], &str)] = &[
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
    // They process requests of other threads, which wait for them.
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

/// Returns the class by a program's own function, if one of these frames is one, with the rule and the frame.
pub(super) fn program_rule(user: &[String]) -> Option<(WaitClass, &'static str, &str)> {
    user.iter().find_map(|frame| {
        let (class, _, why) =
            PROGRAM_FUNCTIONS.iter().find(|(_, names, _)| names.iter().any(|pattern| matches_frame(frame, pattern)))?;
        Some((*class, *why, frame.as_str()))
    })
}

/// Returns whether the pattern matches this frame, entirely or without its parameters, file and line.
fn matches_frame(frame: &str, pattern: &str) -> bool {
    // The first character rules out most pairs; there are many frames and patterns.
    let first = pattern.as_bytes().first();
    if first != Some(&b'*') && first != frame.as_bytes().first() {
        return false;
    }
    let bare = frame.split_once('(').map_or(frame, |(name, _)| name.trim_end());
    matches_pattern(bare, pattern) || matches_pattern(frame, pattern)
}

/// Returns whether the pattern matches the whole text; `*` matches anything.
fn matches_pattern(text: &str, pattern: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (between, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in between.split('*') {
        // The earliest match leaves most text for the other parts.
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
    fn parses_rules() {
        let text = "# of our server\n\nlock  my_lock\r\n\tidle queue_pop(int, char)\nnetwork *::Rpc*::call*\n";
        let classes = Classes::parse(text).expect("rules");
        let class_of = |frame: &str| classes.class_of(&[frame.to_owned()]).map(|(class, _)| class);
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
    fn error_names_the_invalid_line() {
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
    fn star_matches_anything() {
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
            assert_eq!(matches_pattern(text, pattern), is_it, "{text} {pattern}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).*", frame in ".*", pattern in "[a*é]{0,8}") {
            let _ = Classes::parse(&text);
            matches_pattern(&frame, &pattern);
            matches_frame(&frame, &pattern);
        }
    }
}
